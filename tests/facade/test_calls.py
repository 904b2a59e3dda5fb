"""step() and calling the pipeline: what goes in, what comes back, and what may change from one call to the next."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pipeloom as pl
from pipeloom.errors import BatchError, RuntimeStateError, UnsupportedShape
from tests.facade.models import WIDTH, Calls, assert_same, chain, gradients, linears, mean_square, plain_loop, rows


def pipeline(model=None, **options):
    return pl.Pipeline(model or chain(), **({"num_stages": 3, "num_microbatches": 4, "loss_fn": mean_square} | options))


def test_step_returns_a_detached_scalar():
    with pipeline() as pipe:
        loss = pipe.step(rows(8))
        assert loss.shape == ()
        assert not loss.requires_grad
        assert loss.allclose(mean_square(chain()(rows(8))))


def test_step_returns_outputs_if_asked():
    with pipeline() as pipe:
        loss, output = pipe.step(rows(9), return_outputs=True)
        assert output.allclose(chain()(rows(9)))
        assert not output.requires_grad
        assert loss.allclose(mean_square(output))


@given(num_rows=st.integers(4, 19), num_microbatches=st.integers(1, 4), num_stages=st.integers(1, 5))
def test_any_batch_that_is_large_enough(num_rows, num_microbatches, num_stages):
    model, plain = chain(), chain()
    with pipeline(model, num_stages=num_stages, num_microbatches=num_microbatches) as pipe:
        pipe.step(rows(num_rows))
    plain_loop(plain, [rows(num_rows)], num_microbatches)
    assert_same(gradients(model), gradients(plain))


@given(num_rows=st.integers(1, 19))
def test_evaluation_of_any_batch_size(num_rows):
    """Also smaller than the number of micro-batches."""
    with pipeline() as pipe:
        output = pipe(rows(num_rows))
    assert output.allclose(chain()(rows(num_rows)), atol=1e-6)
    assert not output.requires_grad


def test_evaluation_of_no_rows():
    with pipeline() as pipe, pytest.raises(BatchError, match="a batch of 0 samples was given for 1 micro-batches"):
        pipe(rows(0))


def test_batch_that_is_smaller_than_the_micro_batches():
    message = r"a batch of 3 samples was given for 4 micro-batches; each needs at least one\nhint: pass a larger batch"
    with pipeline() as pipe:
        with pytest.raises(BatchError, match=message):
            pipe.step(rows(3))
        assert pipe.step_index == 0
        assert torch.isfinite(pipe.step(rows(4)))


def test_no_batch_at_all():
    with pipeline() as pipe:
        with pytest.raises(BatchError, match="0 arguments and 0 keyword arguments were given, and no tensor"):
            pipe.step()
        with pytest.raises(BatchError, match="1 arguments and 0 keyword arguments were given, and no tensor"):
            pipe("text")


def test_training_and_evaluation_take_turns():
    with pipeline() as pipe:
        first = pipe(rows(6))
        pipe.step(rows(8))
        assert torch.equal(pipe(rows(6)), first)
        assert pipe.step_index == 1


def test_evaluation_leaves_no_trace():
    with pipeline() as pipe:
        pipe.step(rows(8))
        before = gradients(pipe)
        pipe(rows(8), broadcast_output=True)
        assert_same(gradients(pipe), before)
        assert pipe.step_index == 1


def test_evaluation_mode_reaches_the_layers():
    with pipeline(chain(nn.Linear(WIDTH, 3), nn.Dropout(0.9), nn.Tanh())) as pipe:
        assert pipe.eval() is pipe
        assert torch.equal(pipe(rows(4)), pipe(rows(4)))
        assert (pipe(rows(4)) != 0).all()
        pipe.train()
        assert (pipe(rows(64)) == 0).any()


def test_number_of_micro_batches_may_change():
    model, plain = chain(), chain()
    with pipeline(model) as pipe:
        for num_microbatches in (4, 2, 7, 1):
            pipe.num_microbatches = num_microbatches
            pipe.step(rows(8))
            plain_loop(plain, [rows(8)], num_microbatches)
            assert pipe.schedule.num_microbatches == num_microbatches
        assert_same(gradients(pipe), gradients(plain))


@pytest.mark.parametrize("count", [0, -3, 1.5, True, "4", None])
def test_number_of_micro_batches_that_is_none(count):
    with pipeline() as pipe:
        if count is not None:
            with pytest.raises(UnsupportedShape, match=r"num_microbatches=.* was given; a whole number of at least 1"):
                pipe.num_microbatches = count
            assert pipe.num_microbatches == 4
        else:
            pipe.num_microbatches = None
            assert pipe.num_microbatches == 3


def test_sequence_length_may_change():
    model = chain(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    with pipeline(model) as pipe:
        for length in (5, 2, 11):
            tokens = torch.arange(4 * length).remainder(9).reshape(4, length)
            assert torch.isfinite(pipe.step(tokens))
            assert pipe(tokens).shape == (4, length, 3)


def test_outputs_are_merged_leaf_by_leaf():
    def last(x):
        return {"rows": x, "mean": x.mean(), "name": "same", "pair": (x.sum(1), None), "classes": x.shape[1]}

    with pipeline(chain(nn.Linear(WIDTH, 3), nn.Tanh(), Calls(last))) as pipe:
        output, whole = pipe(rows(7)), last(torch.tanh(chain(nn.Linear(WIDTH, 3))(rows(7))))
    assert output["rows"].allclose(whole["rows"])
    assert output["mean"].allclose(whole["mean"])
    assert (output["name"], output["classes"]) == ("same", 3)
    assert output["pair"][0].allclose(whole["pair"][0])


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            lambda x: float(x.detach().sum()),
            r"output\['extra'\] is -?\d+\.\d+ in micro-batch 0 and -?\d+\.\d+ in micro-batch 1",
        ),
        (lambda x: str(x[0, 0].item()), r"output\['extra'\] is '.*' in micro-batch 0 and '.*' in micro-batch 1"),
        (lambda x: x[:1].flatten(), r"output\['extra'\] is a?.*tensor.* in micro-batch 0 and .* in micro-batch 1"),
    ],
)
@pytest.mark.parametrize("is_training", [False, True])
def test_output_leaf_that_differs(leaf, message, is_training):
    model = chain(nn.Linear(WIDTH, 3), nn.Tanh(), Calls(lambda x: {"rows": x, "extra": leaf(x)}))
    with pipeline(model, loss_fn=lambda output: output["rows"].mean()) as pipe:
        with pytest.raises(BatchError, match=message):
            pipe.step(rows(9), return_outputs=True) if is_training else pipe(rows(9))
        assert all(gradient is None for gradient in gradients(pipe).values())
        assert pipe.step_index == 0


def test_tensor_of_other_rows_is_refused():
    message = r"args\[1\] has shape \(5, 4\), but the batch has 8 samples(.|\n)*Replicated"
    model = chain(nn.Bilinear(WIDTH, WIDTH, 3), nn.Tanh(), nn.Tanh())
    with pipeline(model) as pipe, pytest.raises(BatchError, match=message):
        pipe.step(rows(8), rows(5))


def test_replicated_tensors_reach_every_micro_batch():
    model = chain(Calls(lambda x, table: x @ table), nn.Linear(WIDTH, 3), nn.Tanh())
    with pipeline(model) as pipe:
        output = pipe(rows(8), pl.Replicated(torch.eye(WIDTH)))
        loss = pipe.step(rows(8), pl.Replicated(torch.eye(WIDTH)))
    assert output.shape == (8, 3)
    assert loss.allclose(mean_square(output))


@pytest.mark.parametrize("recompute", [False, True, [True, False, True]])
def test_batch_norm_counts_each_micro_batch_once(recompute):
    model, plain = (chain(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.Linear(5, 3)) for _ in "ab")
    with pl.Pipeline(model, cuts=[1, 2], num_microbatches=4, loss_fn=mean_square, recompute=recompute) as pipe:
        pipe.step(rows(12))
    plain_loop(plain, [rows(12)], 4)
    assert model[1].num_batches_tracked == 4
    assert torch.equal(model[1].running_mean, plain[1].running_mean)
    assert torch.equal(model[2].running_var, plain[2].running_var)


@pytest.mark.parametrize("recompute", [False, True])
def test_deferred_batch_norm_counts_the_batch(recompute):
    options = {"batch_norm": "deferred", "recompute": recompute, "num_stages": 2}
    model, whole = (chain(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5)) for _ in "ab")
    with pipeline(model, **options) as pipe:
        pipe.step(rows(11))
    whole(rows(11))
    assert model[1].num_batches_tracked == 1
    assert model[1].running_var.allclose(whole[1].running_var)


def test_layer_that_differentiates_in_its_forward():
    """Forces from an energy: the forward runs a backward of its own, with recomputation too."""

    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))

        def forward(self, x):
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    plain = chain(nn.Linear(WIDTH, WIDTH), Force(), nn.Linear(WIDTH, 3))
    plain_loop(plain, [rows(8)], 4)
    for recompute in (False, True):
        with pipeline(chain(nn.Linear(WIDTH, WIDTH), Force(), nn.Linear(WIDTH, 3)), recompute=recompute) as pipe:
            pipe.step(rows(8))
            assert_same(gradients(pipe), gradients(plain))


def test_hooks_on_layers_fire_as_in_the_whole_model():
    log = []
    model = chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    model[1].register_forward_pre_hook(lambda module, args: log.append(("before", args[0].shape)))
    model[1].register_forward_hook(lambda module, args, output: output * 2)
    model[1].register_full_backward_hook(lambda module, ins, outs: log.append(("back", ins[0].shape, outs[0].shape)))
    with pipeline(model) as pipe:
        pipe.step(rows(8))
        found = gradients(pipe)
    assert log.count(("before", (2, WIDTH))) == log.count(("back", (2, WIDTH), (2, WIDTH))) == 4
    model.zero_grad()
    plain_loop(model, [rows(8)], 4)
    assert_same(found, gradients(model))


def test_hooks_on_parameters_fire_once_per_micro_batch():
    model, seen = linears(3), []
    model[1].weight.register_hook(lambda gradient: seen.append(gradient.shape))
    with pipeline(model) as pipe:
        pipe.step(rows(8))
    assert seen == [(WIDTH, WIDTH)] * 4


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("loss_fn", [mean_square, lambda output: (output.square().sum(), output.numel())])
def test_sparse_gradients(is_sparse, loss_fn):
    model = chain(nn.Embedding(9, WIDTH, sparse=is_sparse), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    tokens = torch.arange(8)
    with pipeline(model, loss_fn=loss_fn) as pipe:
        pipe.step(tokens)
        pipe.step(tokens)
    plain = chain(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    (2 * mean_square(plain(tokens))).backward()
    assert model[0].weight.grad.is_sparse is is_sparse
    assert model[0].weight.grad.to_dense().allclose(plain[0].weight.grad)


def test_same_layer_twice_in_a_stage():
    shared = nn.Linear(WIDTH, WIDTH)
    model = chain(shared, nn.Tanh(), shared, nn.Linear(WIDTH, 3))
    with pl.Pipeline(model, cuts=[3], num_microbatches=4, loss_fn=mean_square) as pipe:
        pipe.step(rows(8))
        found = gradients(pipe)
    model.zero_grad()
    plain_loop(model, [rows(8)], 4)
    assert_same(found, gradients(model))


@pytest.mark.parametrize("devices", [["cpu", "cpu", "cpu"], [torch.device("cpu")] * 3])
def test_devices_of_the_ranks(devices):
    with pipeline(devices=devices) as pipe:
        pipe.step(rows(8))
        plain_loop(plain := chain(), [rows(8)], 4)
        assert_same(gradients(pipe), gradients(plain))
        assert pipe(rows(5)).device.type == "cpu"


def test_inputs_are_moved_to_a_stage_device():
    """The meta device stands for one that the input does not live on."""
    with pipeline(num_stages=2, devices=["meta", "meta"], on_nan="ignore") as pipe:
        loss = pipe.step(rows(8))
        assert pipe(rows(5)).device.type == "meta"
        assert loss.device.type == "meta"
        assert next(pipe.parameters()).grad.device.type == "meta"


def test_timeline_of_the_last_step():
    with pipeline() as pipe:
        with pytest.raises(
            RuntimeStateError, match=r"no step was traced yet\nhint: call step\(\) once, with trace=True"
        ):
            _ = pipe.timeline
        pipe.step(rows(8))
        measured = pipe.timeline
        assert isinstance(measured, pl.Timeline)
        assert {span.action for span in measured} == set(pipe.schedule)
        assert measured.makespan_s > 0


def test_no_timeline_without_trace():
    with pipeline(trace=False) as pipe:
        pipe.step(rows(8))
        with pytest.raises(RuntimeStateError, match="no step was traced yet"):
            _ = pipe.timeline
        pipe.trace = True
        pipe.step(rows(8))
        assert pipe.timeline.schedule == pipe.schedule


def test_clipping_covers_all_stages():
    with pipeline() as pipe:
        pipe.step(rows(8))
        norm = torch.stack([p.grad.norm() for p in pipe.parameters()]).norm()
        assert pipe.clip_grad_norm_(norm / 2).allclose(norm)
        assert torch.stack([p.grad.norm() for p in pipe.parameters()]).norm().allclose(norm / 2)
        next(pipe.parameters()).grad.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="non-finite"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_seed_and_step_decide_the_draws():
    def gradient_of(seed, step_index):
        with pipeline(chain(nn.Linear(WIDTH, 3), nn.Dropout(0.5), nn.Linear(3, 3)), seed=seed) as pipe:
            pipe.step_index = step_index
            pipe.step(rows(8))
            return gradients(pipe)["0.weight"]

    assert torch.equal(gradient_of(1, 5), gradient_of(1, 5))
    assert not torch.equal(gradient_of(1, 5), gradient_of(2, 5))
    assert not torch.equal(gradient_of(1, 5), gradient_of(1, 6))


@pytest.mark.parametrize(("name", "where"), [("to", r"; its model has: pipe\.unwrap\(\)\.to, when"), ("grow", "$")])
def test_what_a_model_has_and_its_pipeline_has_not(name, where):
    """What people of Hugging Face try first: pipe.to(device), pipe.generate(...), Trainer(pipe)."""
    pipe = pl.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_stages=2)
    with pytest.raises(AttributeError, match=rf"'Pipeline' object has no attribute '{name}'{where}"):
        getattr(pipe, name)
    assert not hasattr(pipe, "_grow")


class Named(pl.Pipeline):
    @property
    def first_name(self):
        return self.names[0]


def test_what_a_property_lacks_is_said_and_not_the_property():
    """A subclass's property was told to be missing, where what it asks for was."""
    pipe = Named(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_stages=2)
    with pytest.raises(AttributeError, match=r"'Named' object has no attribute 'names'$"):
        _ = pipe.first_name
