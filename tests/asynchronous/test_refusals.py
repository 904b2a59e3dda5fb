"""What a stream refuses, what it leaves behind when it fails, and that a version is used by whoever is due to."""

import threading
from collections import Counter

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import BatchError, LossError, RuntimeStateError, UnsupportedShape
from tests.asynchronous.models import OPTIMIZERS, WIDTH, batches, chain, plain, seeded, square

SGD = OPTIMIZERS["sgd"]


def pipeline(make=plain, **options):
    given = {"num_stages": 4, "schedule": "pipedream", "loss_fn": square, **options}
    return pl.Pipeline(make if isinstance(make, nn.Module) else seeded(make), **given)


def test_a_step_says_how_to_run_it():
    with (
        pipeline() as pipe,
        pytest.raises(
            RuntimeStateError, match=r"(?s)step\(\) was called, but schedule 'pipedream' updates.*pipe\.stream"
        ),
    ):
        pipe.step(*batches(1)[0])


def test_a_stream_of_a_synchronous_schedule_says_what_to_do():
    with (
        pipeline(schedule="1f1b") as pipe,
        pytest.raises(RuntimeStateError, match=r"schedule '1f1b' leaves updates to you.*\n.*schedule='pipedream'"),
    ):
        pipe.stream(SGD)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_norm": "deferred"}, "batch_norm='deferred' was given with schedule 'pipedream'"),
        ({"on_nan": "skip"}, "on_nan='skip' was given with schedule 'pipedream'"),
    ],
)
def test_what_is_too_late_once_weights_have_changed(options, message):
    with pipeline(**options) as pipe, pytest.raises(RuntimeStateError, match=message):
        pipe.stream(SGD)


def test_weights_that_no_optimizer_has():
    """Its optimizers went on to update weights that the model no longer had, and nothing said so."""
    model = seeded(plain)
    model[1].requires_grad_(False)
    with pipeline(model) as pipe:
        stream = pipe.stream(SGD)
        stream.train(batches(2))
        model[0].weight.data = torch.eye(WIDTH)
        model[2].requires_grad_(False)
        stream.train(batches(2))
        model[1].requires_grad_(True)
        with pytest.raises(RuntimeStateError, match="the model has trainable weights that it did not have when"):
            stream.train(batches(2))
        stream = pipe.stream(SGD)
        stream.train(batches(2))
        model[3].weight = nn.Parameter(torch.eye(WIDTH))
        with pytest.raises(RuntimeStateError, match="the model has trainable weights that it did not have when"):
            stream.train(batches(2))


def test_a_function_that_makes_no_optimizer():
    with (
        pipeline() as pipe,
        pytest.raises(RuntimeStateError, match="optimizer= returned None for a stage; an optimizer"),
    ):
        pipe.stream(lambda weights: None).train(batches(1))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), None])
def test_an_optimizer_is_made_for_each_stage(optimizer):
    with pipeline() as pipe, pytest.raises(RuntimeStateError, match="a function that makes one for each stage"):
        pipe.stream(optimizer)


def test_tied_weights_would_differ():
    def tied():
        layers = plain()
        layers[3].weight = layers[0].weight
        return layers

    with (
        pipeline(tied) as pipe,
        pytest.raises(RuntimeStateError, match=r"stages share weights \(0.weight, 3.weight\).*\n.*untie"),
    ):
        pipe.stream(SGD).train(batches(2))


def test_a_loss_with_weights_of_its_own_has_nobody_to_update_them():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, target):
            return square(output * self.scale, target)

    with (
        pipeline(loss_fn=Learned()) as pipe,
        pytest.raises(LossError, match="holds weights that are not of the last stage"),
    ):
        pipe.stream(SGD).train(batches(2))


def test_gradients_that_are_there_already():
    with pipeline() as pipe:
        next(pipe.parameters()).grad = torch.zeros(WIDTH, WIDTH)
        with pytest.raises(RuntimeStateError, match=r"parameter '0\.weight' has a gradient already"):
            pipe.stream(SGD).train(batches(2))
        pipe.zero_grad()
        assert pipe.stream(SGD).train(batches(2)).shape == (2,)


def test_a_hook_that_waits_for_the_sum():
    def hooked():
        layers = plain()
        layers[2].weight.register_post_accumulate_grad_hook(lambda weight: None)
        return layers

    with pipeline(hooked) as pipe, pytest.raises(RuntimeStateError, match=r"'2.weight' has a hook that runs after"):
        pipe.stream(SGD).train(batches(2))


def test_an_input_that_requires_a_gradient():
    x, target = batches(1)[0]
    with pipeline() as pipe, pytest.raises(BatchError, match="an input of the stream requires a gradient"):
        pipe.stream(SGD).train([(x.requires_grad_(), target)])


@pytest.mark.parametrize(
    ("given", "message"),
    [([], "no batch was given"), ([torch.zeros(4, WIDTH)], "a batch of the stream is a Tensor; a pair")],
)
def test_batches_that_are_none(given, message):
    with pipeline() as pipe, pytest.raises(BatchError, match=message):
        pipe.stream(SGD).train(given)


def test_gradients_switched_off():
    with pipeline() as pipe, torch.no_grad(), pytest.raises(RuntimeStateError, match="gradients switched off"):
        pipe.stream(SGD).train(batches(1))


def test_2bw_needs_as_many_parts_as_ranks():
    with pytest.raises(UnsupportedShape, match=r"with 3 micro-batches in a batch on 4 ranks(?s:.*)or take 'pipedream'"):
        pipeline(schedule="pipedream-2bw", num_microbatches=3)
    with pipeline(schedule="pipedream-2bw") as pipe:
        assert pipe.num_microbatches == 4
    with pipeline() as pipe:
        assert pipe.num_microbatches == 1


def test_a_schedule_of_so_many_batches():
    made = pl.schedule("pipedream", num_ranks=4, num_microbatches=3)
    with pipeline(schedule=made) as pipe:
        with pytest.raises(UnsupportedShape, match="2 batches were given with a schedule that updates weights 3 times"):
            pipe.stream(SGD).train(batches(2))
        assert pipe.stream(SGD).train(batches(3)).shape == (3,)


def test_counts_that_come_with_the_losses_of_several_parts():
    def counted(output, target):
        return (output - target).square().sum(), target.numel()

    with (
        pipeline(schedule="pipedream-2bw", loss_fn=counted) as pipe,
        pytest.raises(LossError, match=r"the loss came as \(sum, count\)(?s:.*)hint: give loss_count="),
    ):
        pipe.stream(SGD).train(batches(2))


def test_a_loss_that_is_not_finite_ends_the_stream():
    given = batches(4)
    given[2][0][:] = torch.nan
    with pipeline() as pipe, pytest.raises(LossError, match="the loss of batch 2 of the stream is nan"):
        pipe.stream(SGD).train(given)
    with pipeline(on_nan="ignore") as pipe:
        losses = pipe.stream(SGD).train(given)
        assert losses.isnan().tolist() == [False, False, True, True]


def test_after_a_failure_the_model_has_its_own_parameters_and_no_gradients():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 4:
                raise ZeroDivisionError("fourth call")
            return self.linear(x)

    model = nn.Sequential(*plain()[:2], Fails(), nn.Linear(WIDTH, WIDTH))
    own = list(model.parameters())
    with pipeline(model) as pipe:
        stream = pipe.stream(OPTIMIZERS["momentum"])
        with pytest.raises(ZeroDivisionError, match="fourth call"):
            stream.train(batches(6))
        assert all(one is other for one, other in zip(model.parameters(), own, strict=True))
        assert all(parameter.grad is None for parameter in own)
        assert stream.train(batches(6)).shape == (6,)


class Kept(nn.Module):
    """A weight that the forward finds past the module: so it would never use an older version."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        weight = self.weight
        self.kept = lambda: weight

    def forward(self, x):
        return x @ self.kept()


def test_a_weight_that_is_used_past_its_module_is_refused_by_name():
    model = nn.Sequential(Kept(), *plain()[:3])
    with pipeline(model) as pipe, pytest.raises(RuntimeStateError, match="used the parameter 'weight' of a Kept by"):
        pipe.stream(SGD).train(batches(3))


def test_a_late_rank_leaves_no_version_in_the_model():
    """Rank 0 was in its forward when rank 3 failed: what the user then saved had a leaf of some older version."""
    entered, failed, calls = threading.Event(), threading.Event(), Counter()

    class Waits(nn.Linear):
        def forward(self, x):
            calls["first"] += 1
            if calls["first"] == 4:  # as many as it may run ahead
                entered.set()
                failed.wait()
            return super().forward(x)

    class Fails(nn.Linear):
        def forward(self, x):
            calls["last"] += 1
            if calls["last"] == 1:
                entered.wait()
                raise ZeroDivisionError("once")
            return super().forward(x)

    model = nn.Sequential(Waits(WIDTH, WIDTH), *plain()[:2], Fails(WIDTH, WIDTH))
    own = list(model.parameters())
    with pipeline(model) as pipe:
        stream = pipe.stream(SGD)
        with pytest.raises(ZeroDivisionError, match="once") as found:
            stream.train(batches(8))
        assert "ranks [0] were still busy" in found.value.__notes__[-1]
        assert all(one is other for one, other in zip(model.parameters(), own, strict=True))
        failed.set()
        assert stream.train(batches(3)).shape == (3,)
        assert all(one is other for one, other in zip(model.parameters(), own, strict=True))
        assert all(parameter.grad is None for parameter in own)


class Renormed(nn.Module):
    """An embedding that is kept short writes into its weight before it is used."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, max_norm=0.5)

    def forward(self, x):
        return self.embedding(x.argmax(-1)) + x


def test_a_forward_that_writes_its_weight_is_refused_by_name():
    """It wrote into whichever version the micro-batch was due: numbers of no rule."""
    model = nn.Sequential(Renormed(), *plain()[:3])
    own = list(model.parameters())
    with pipeline(model) as pipe:
        with pytest.raises(
            RuntimeStateError, match=r"forward of a Embedding wrote into its parameter 'weight' \(as max"
        ):
            pipe.stream(SGD).train(batches(3))
        assert all(one is other for one, other in zip(model.parameters(), own, strict=True))


def of_one_memory(kind):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.eye(2 * WIDTH, WIDTH)
            self.first = nn.Parameter(whole[:WIDTH])
            if kind == "buffer":
                self.register_buffer("second", self.first.data)
            else:
                self.second = nn.Parameter(self.first.data if kind == "parameter" else whole[WIDTH:])

        def forward(self, x):
            return x @ self.first @ self.second

    return nn.Sequential(*(Twice() for _ in range(4)))


@pytest.mark.parametrize("kind", ["buffer", "parameter", "apart"])
def test_weights_on_the_memory_of_another_tensor(kind):
    """A weight moved to new memory while an older version was in use, and the other tensor stayed behind."""
    with pipeline(of_one_memory(kind)) as pipe:
        stream = pipe.stream(SGD)
        if kind == "apart":
            assert stream.train(batches(3)).shape == (3,)
        else:
            with pytest.raises(RuntimeStateError, match=r"'0\.0\.first' and '0\.0\.second' share memory"):
                stream.train(batches(3))


def test_evaluation_between_two_streams_uses_the_newest_weights():
    model = seeded(chain)
    with pipeline(model) as pipe:
        stream, (x, _) = pipe.stream(SGD), batches(1)[0]
        stream.train(batches(5))
        pipe.eval()
        assert torch.equal(pipe(x), model(x))
        pipe.train()
        assert stream.train(batches(5)).isfinite().all()
