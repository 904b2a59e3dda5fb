"""The model belongs to the pipeline: its names, its state, its threads, and how it is given back."""

import copy
import gc
import math
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import RuntimeStateError
from tests.facade.models import WIDTH, Calls, chain, linears, mean_square, rows


def pipeline(model=None, **options):
    return pl.Pipeline(model or chain(), **({"num_stages": 3, "num_microbatches": 3, "loss_fn": mean_square} | options))


def rank_threads(others):
    """Names of the threads of ranks besides those that earlier tests have left: their pipelines may still be there."""
    running = [thread for thread in threading.enumerate() if thread not in others]
    return {thread.name for thread in running if thread.name.startswith("pipeloom-rank")}


class Named(nn.Sequential):
    """A chain with names instead of numbers, a buffer, and a module inside a module."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 3)


@pytest.mark.parametrize("build", [chain, Named])
def test_names_are_the_whole_models(build):
    model = build()
    names, keys = [name for name, _ in model.named_parameters()], list(model.state_dict())
    with pipeline(model) as pipe:
        assert [name for name, _ in pipe.named_parameters()] == names
        assert list(pipe.state_dict()) == list(pipe.full_state_dict()) == keys
        assert all(found is own for found, own in zip(pipe.parameters(), model.parameters(), strict=True))


def test_state_goes_round():
    with pipeline(Named()) as one, pipeline(Named()) as other:
        one.step(rows(6))
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        one.eval(), other.eval()
        assert torch.equal(one(rows(5)), other(rows(5)))
        plain = Named().eval()
        plain.load_state_dict(one.state_dict())
        assert plain(rows(5)).allclose(one(rows(5)), atol=1e-6)


def test_state_of_another_model_is_refused():
    with pipeline(Named()) as pipe:
        with pytest.raises(RuntimeError, match=r"Missing key\(s\).*stem.weight(.|\n)*Unexpected key\(s\).*0.weight"):
            pipe.load_state_dict(chain().state_dict())
        missing, unexpected = pipe.load_state_dict(chain().state_dict(), strict=False)
        assert "stem.weight" in missing
        assert "0.weight" in unexpected


def test_optimizer_trains_the_model():
    with pipeline() as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)
        losses = []
        for _ in range(8):
            losses.append(pipe.step(rows(12)).item())
            optimizer.step()
            pipe.zero_grad()
        assert losses[-1] < 0.7 * losses[0]
        assert all(parameter.grad is None for parameter in pipe.parameters())


def test_zero_grad_can_keep_the_tensors():
    with pipeline() as pipe:
        pipe.step(rows(6))
        pipe.zero_grad(set_to_none=False)
        assert all((parameter.grad == 0).all() for parameter in pipe.parameters())
        first = pipe.step(rows(6))
        assert torch.isfinite(first)


def test_notebook_shows_what_a_pipeline_is():
    """Before its first step and after it was closed, too."""
    pipe = pipeline(num_stages=2, num_microbatches=5, schedule="gpipe")
    shown = "Pipeline('gpipe', num_stages=2, num_ranks=2, num_microbatches=5)"
    assert repr(pipe) == shown
    pipe.close()
    assert repr(pipe) == shown


def test_interrupt_leaves_the_callers_gradient_mode(monkeypatch):
    """Ctrl-C may fall between the end of a `no_grad` of ours and its putting back what was on before."""
    pipe = pipeline()

    def interrupted(_):
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    monkeypatch.setattr(pipe._assembled.ties, "refresh", interrupted)
    with torch.enable_grad():
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            pipe.step(rows(6))
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("num_lines", range(1, 7))
def test_interrupt_does_not_leave_the_pipeline_in_use(num_lines):
    """Ctrl-C at any line in which a step takes the pipeline for itself."""
    pipe, seen = pipeline(), []

    def trace(frame, event, _):
        if frame.f_code.co_name == "_running" and event == "line":
            seen.append(frame.f_lineno)
            if len(seen) == num_lines:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            pipe.step(rows(6))
    finally:
        sys.settrace(before)
    assert torch.isfinite(pipe.step(rows(6)))


def test_unwrap_gives_the_model_back():
    model = chain()
    pipe = pipeline(model)
    pipe.step(rows(6))
    assert pipe.unwrap() is model
    assert model(rows(2)).shape == (2, 3)
    with pytest.raises(RuntimeStateError, match=r"the pipeline is closed\nhint: make a new one from the model"):
        pipe.step(rows(6))


def test_unwrap_gives_a_list_back():
    stages = [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    assert pl.Pipeline(stages).unwrap() is stages
    with pl.Pipeline(stages) as pipe:
        assert [name for name, _ in pipe.named_parameters()] == ["0.weight", "0.bias"]


def test_module_that_is_no_chain_is_one_stage():
    model = nn.Bilinear(WIDTH, WIDTH, 3)
    with pl.Pipeline(model, loss_fn=mean_square) as pipe:
        loss = pipe.step(rows(4), rows(4))
        assert (pipe.num_stages, pipe.num_microbatches) == (1, 1)
    assert loss.allclose(mean_square(model(rows(4), rows(4))))


@pytest.mark.parametrize("call", ["step", "__call__"])
def test_closed_pipeline_runs_no_more(call):
    pipe = pipeline()
    with pipe as entered:
        assert entered is pipe
    with pytest.raises(RuntimeStateError, match="the pipeline is closed"):
        getattr(pipe, call)(rows(6))
    pipe.close()
    assert len(list(pipe.parameters())) == 8


def test_threads_start_with_the_first_step_and_end_with_the_pipeline():
    others = threading.enumerate()
    pipe = pipeline()
    assert rank_threads(others) == set()
    pipe.step(rows(6))
    assert rank_threads(others) == {"pipeloom-rank-0", "pipeloom-rank-1", "pipeloom-rank-2"}
    pipe.close()
    assert rank_threads(others) == set()


def test_threads_are_kept_from_step_to_step():
    seen = set()
    with pipeline(chain(nn.Linear(WIDTH, 3), Calls(lambda x: seen.add(threading.get_ident()) or x), nn.Tanh())) as pipe:
        for _ in range(4):
            pipe.step(rows(6))
        pipe(rows(6))
    assert len(seen) == 1


def test_threads_end_when_nobody_has_the_pipeline():
    """No cycle may keep it: collecting garbage is not needed."""
    others, pipe = threading.enumerate(), pipeline()
    pipe.step(rows(6))
    gc.disable()
    try:
        del pipe
        assert rank_threads(others) == set()
    finally:
        gc.enable()


def test_two_pipelines_at_a_time():
    """Each has its own threads; a step of one in a thread does not disturb the other."""
    results, models = {}, {"one": chain(), "other": chain()}

    def run(name):
        with pipeline(models[name]) as pipe:
            for _ in range(3):
                results[name] = (pipe.step(rows(6)), pipe(rows(6)))

    users = [threading.Thread(target=run, args=(name,)) for name in ("one", "other")]
    [user.start() for user in users]
    [user.join(30) for user in users]
    assert torch.equal(results["one"][0], results["other"][0])
    assert torch.equal(results["one"][1], results["other"][1])


def test_model_may_be_used_alone_between_steps():
    model = linears(3)
    with pipeline(model) as pipe:
        pipe.step(rows(6))
        whole = model(rows(6))
        assert pipe(rows(6)).allclose(whole)
        whole.sum().backward()
        assert torch.isfinite(pipe.step(rows(6)))


def test_module_of_two_stages_is_refused_by_name():
    """Two threads would run it at once; a weight alone may be shared."""
    model = Named()
    model.body.add_module("again", model.stem)
    message = r"'body.again' of stage 1 is the same module as 'stem' of stage 0; .*\nhint: choose cuts="
    with pytest.raises(pl.errors.SplitError, match=message):
        pipeline(model)
    assert pl.Pipeline(model).unwrap() is model


def test_tied_weight_has_one_name_and_one_gradient():
    model = linears(3)
    model[2].weight = model[0].weight
    names = [name for name, _ in model.named_parameters()]
    with pipeline(model) as pipe:
        pipe.step(rows(6))
        assert [name for name, _ in pipe.named_parameters()] == names
        assert pipe.unwrap()[2].weight is model[0].weight
    found = model[0].weight.grad.clone()
    model.zero_grad()
    mean_square(model(rows(6))).backward()
    assert found.allclose(model[0].weight.grad)


@pytest.mark.parametrize("error", [ValueError, None])
def test_tied_weight_after_a_step_that_failed(error):
    """Shares that were not summed yet must not be found by the next step."""

    def loss_fn(output):
        if output.abs().max() > 1e6:
            raise ValueError("too large")
        return mean_square(output)

    model, plain = linears(3), linears(3)
    model[2].weight, plain[2].weight = model[0].weight, plain[0].weight
    bad = rows(6).index_fill(0, torch.tensor([5]), 1e9 if error else math.inf)
    with pipeline(model, loss_fn=loss_fn) as pipe:
        with pytest.raises(error or pl.errors.NonFiniteLoss, match=r"too large|micro-batch 2 is (nan|inf)"):
            pipe.step(bad)
        assert all(parameter.grad is None for parameter in pipe.parameters())
        pipe.step(rows(6))
    mean_square(plain(rows(6))).backward()
    assert model[0].weight.grad.allclose(plain[0].weight.grad)


CHANGED = {
    "replaced": lambda model: model.__setitem__(1, nn.Linear(WIDTH, WIDTH)),
    "added": lambda model: model.append(nn.Linear(WIDTH, WIDTH)),
    "removed": lambda model: model.__delitem__(2),
}


@pytest.mark.parametrize("call", ["step", "__call__"])
@pytest.mark.parametrize("change", CHANGED)
def test_layers_that_change_under_the_pipeline(change, call):
    """The stages would go on with the old layers, and the new ones would never learn."""
    model = linears(3)
    with pipeline(model) as pipe:
        CHANGED[change](model)
        with pytest.raises(RuntimeStateError, match=r"layers \d of the model were replaced, added or removed after it"):
            getattr(pipe, call)(rows(6))


def test_layers_may_change_inside():
    """As LoRA does: a layer of ours stays, what is in it does not."""
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Sequential(nn.Linear(WIDTH, 3)))
    with pipeline(model, num_stages=2) as pipe:
        model[1][0] = nn.Linear(WIDTH, 5)
        assert pipe(rows(4)).shape == (4, 5)
        pipe.step(rows(4))
        assert model[1][0].weight.grad is not None


def run_script(body):
    head = "import pipeloom as pl, time, torch\nfrom torch import nn\n"
    command = [sys.executable, "-W", "error", "-c", head + textwrap.dedent(body)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def test_process_ends_with_a_pipeline_that_nobody_closed():
    done = run_script(
        """
        pipe = pl.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_stages=2, loss_fn=torch.mean)
        pipe.step(torch.ones(4, 2))
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_process_ends_while_a_rank_is_busy_in_torch():
    """A daemon thread that comes back from C++ into an interpreter that is gone would abort the process."""
    done = run_script(
        """
        from pipeloom.runtime import threads
        threads.GRACE_S = 0.01

        class Busy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value * 1

            @staticmethod
            def backward(ctx, grad):
                time.sleep(1)
                return grad

        class Layer(nn.Module):
            def forward(self, value):
                return Busy.apply(value)

        class Fails(nn.Module):
            num_calls = 0
            def forward(self, value):
                Fails.num_calls += 1
                if Fails.num_calls == 2:
                    time.sleep(0.3)
                    raise ValueError("the second micro-batch")
                return value

        model = nn.Sequential(nn.Linear(2, 2), Layer(), Fails())
        pl.Pipeline(model, cuts=[2], num_microbatches=2, loss_fn=torch.mean).step(torch.ones(4, 2))
        """
    )
    assert done.returncode == 1
    assert "ValueError: the second micro-batch" in done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_has_threads_of_its_own():
    done = run_script(
        """
        import os
        pipe = pl.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_stages=2)
        expected = pipe(torch.ones(4, 2))
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(pipe(torch.ones(4, 2)), expected) else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
