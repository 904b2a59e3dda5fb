"""Losses as people write them, and what is said about those that cannot be used."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import LossError, NonFiniteLoss, PipeloomWarning
from tests.facade.models import WIDTH, Calls, assert_same, chain, gradients, linears, mean_square, rows

TARGETS = torch.arange(7).remainder(3)


def pipeline(loss_fn, model=None, **options):
    options = {"num_stages": 2, "num_microbatches": 3} | options
    return pl.Pipeline(model or chain(), loss_fn=loss_fn, **options)


def whole_batch(loss_fn, model=None):
    model = model or chain()
    loss = loss_fn(model(rows(7)), TARGETS)
    loss.backward()
    return loss.detach(), gradients(model)


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    assert all(found[name].allclose(expected[name], atol=1e-7) for name in expected)


def cross_entropy_sum(output, target):
    return F.cross_entropy(output, target, reduction="sum"), len(target)


@pytest.mark.parametrize(
    "loss_fn",
    [nn.CrossEntropyLoss(), F.cross_entropy, cross_entropy_sum, lambda o, t: F.cross_entropy(o, t).reshape(1)],
    ids=["module", "function", "sum and count", "one element"],
)
def test_mean_of_the_whole_batch(loss_fn):
    """Batches of 7 in 3 micro-batches: 3 + 2 + 2 rows, so an unweighted mean would be another number."""
    expected, expected_gradients = whole_batch(F.cross_entropy)
    with pipeline(loss_fn) as pipe:
        loss = pipe.step(rows(7), target=TARGETS)
        assert loss.shape == ()
        assert not loss.requires_grad
        assert loss.allclose(expected)
        assert_close(gradients(pipe), expected_gradients)


@pytest.mark.parametrize("source", ["argument", "attribute", "returned"])
def test_uneven_counts_weigh_micro_batches(source):
    """Ignored targets: micro-batches count 3, 0 and 1."""
    target = torch.tensor([0, 1, 2, -100, -100, 1, -100])

    def count(each):
        return (each != -100).sum()

    def summed(output, each):
        loss = F.cross_entropy(output, each, reduction="sum")
        return (loss, count(each)) if source == "returned" else loss / count(each).clamp(min=1)

    if source == "attribute":
        summed.count = count
    expected = F.cross_entropy(chain()(rows(7)), target)
    with pipeline(summed, loss_count=count if source == "argument" else None) as pipe:
        assert pipe.step(rows(7), target=target).allclose(expected)
        assert math.isfinite(pipe.clip_grad_norm_(1.0))


def test_ignored_targets_without_counts_warn():
    target = torch.tensor([0, 1, -100, 2, -100, 1, 0])
    with pipeline(nn.CrossEntropyLoss()) as pipe:
        with pytest.warns(
            PipeloomWarning, match=r"targets hold ignore_index \(-100\).*return \(sum, count\)"
        ) as caught:
            pipe.step(rows(7), target=target)
        assert caught[0].filename == __file__


def test_sums_are_added_up():
    def summed(output, target):
        return F.cross_entropy(output, target, reduction="sum")

    expected, expected_gradients = whole_batch(summed)
    with pipeline(summed, loss_reduction="sum") as pipe:
        assert pipe.step(rows(7), target=TARGETS).allclose(expected)
        assert_close(gradients(pipe), expected_gradients)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), cross_entropy_sum])
def test_loss_scale_multiplies_gradients_only(loss_fn):
    with pipeline(loss_fn) as plain, pipeline(loss_fn) as scaled:
        assert torch.equal(plain.step(rows(7), target=TARGETS), scaled.step(rows(7), target=TARGETS, loss_scale=1024.0))
        expected = {name: gradient * 1024 for name, gradient in gradients(plain).items()}
        assert_same(gradients(scaled), expected)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), cross_entropy_sum])
def test_gradients_add_up_over_steps(loss_fn):
    with pipeline(loss_fn) as pipe:
        pipe.step(rows(7), target=TARGETS)
        first = gradients(pipe)
        pipe.step(rows(7), target=TARGETS)
        assert_close(gradients(pipe), {name: 2 * gradient for name, gradient in first.items()})
        pipe.zero_grad()
        pipe.step(rows(7), target=TARGETS)
        assert_same(gradients(pipe), first)


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (mean_square, None),
        (lambda output, target=None: mean_square(output), None),
        (lambda output, scale=1.0: mean_square(output) * scale, None),
        (lambda *values: F.cross_entropy(*values), TARGETS),
        (lambda output, target=None: F.cross_entropy(output, target), TARGETS),
        (lambda output, target, weight=None: F.cross_entropy(output, target, weight), TARGETS),
    ],
)
def test_loss_functions_of_any_signature(loss_fn, target):
    with pipeline(loss_fn) as pipe:
        loss = pipe.step(rows(7), target=target)
        output = pipe(rows(7))
    model = chain()
    with torch.no_grad():
        output = model(rows(7))
    assert loss.allclose(mean_square(output) if target is None else F.cross_entropy(output, TARGETS))


def test_model_that_returns_its_loss():
    model = nn.Sequential(linears(2), Calls(mean_square))
    with pipeline(None, model) as pipe:
        assert pipe.step(rows(6)).allclose(mean_square(linears(2)(rows(6))))
        assert model[0][0].weight.grad is not None


def test_targets_may_be_containers():
    def loss_fn(output, target):
        return F.cross_entropy(output, target["classes"][0]) * target["weight"]

    with pipeline(loss_fn) as pipe:
        found = pipe.step(rows(7), target={"classes": [TARGETS], "weight": 2.0})
    assert found.allclose(2 * F.cross_entropy(chain()(rows(7)), TARGETS))


UNUSABLE = {
    "not a scalar": (lambda o, t: o, r"loss of micro-batch 0 is a tensor of shape \(3, 3\); a scalar tensor, or"),
    "a number": (lambda o, t: 1.5, r"loss of micro-batch 0 is a float; a scalar tensor"),
    "nothing": (lambda o, t: None, r"loss of micro-batch 0 is a NoneType"),
    "sum is no scalar": (lambda o, t: (o, 3), r"is a tensor of shape \(3, 3\)"),
    "count is no number": (
        lambda o, t: (o.sum(), o),
        r"count of micro-batch 0 is a tensor of shape \(3, 3\); a number",
    ),
    "count is text": (lambda o, t: (o.sum(), "x"), r"count of micro-batch 0 is a str; a number"),
    "without a graph": (lambda o, t: o.argmax().float(), r"does not depend on any parameter that requires a gradient"),
    "integer": (lambda o, t: o.argmax(), r"does not depend on any parameter that requires a gradient"),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", UNUSABLE)
def test_losses_that_cannot_be_used(name, recompute):
    loss_fn, message = UNUSABLE[name]
    with pipeline(loss_fn, recompute=recompute) as pipe:
        with pytest.raises(LossError, match=message) as caught:
            pipe.step(rows(7), target=TARGETS)
        assert "rank 1, stage 1, micro-batch 0, action 1F0" in caught.value.__notes__[0]
        assert all(gradient is None for gradient in gradients(pipe).values())


@pytest.mark.parametrize("has_count_first", [False, True])
def test_losses_that_are_not_alike(has_count_first):
    calls = []

    def loss_fn(output, target):
        calls.append(output)
        has_count = (len(calls) == 1) is has_count_first
        return (output.sum(), 1) if has_count else output.sum()

    with pipeline(loss_fn) as pipe, pytest.raises(LossError, match=r"loss of micro-batch 1 came .*all must be alike"):
        pipe.step(rows(7), target=TARGETS)


def test_counts_that_contradict_each_other():
    with (
        pipeline(cross_entropy_sum, loss_count=lambda target: 5) as pipe,
        pytest.raises(LossError, match=r"micro-batch 0 counts 5 by count\(target\), but its loss came with 3"),
    ):
        pipe.step(rows(7), target=TARGETS)


def test_missing_target():
    with pipeline(nn.CrossEntropyLoss()) as pipe:
        with pytest.raises(LossError, match=r"no target was given, and the loss function needs one.*\nhint: call step"):
            pipe.step(rows(7))
        assert pipe.step_index == 0


def test_output_that_is_no_loss():
    """Who forgets loss_fn= is told so."""
    with pipeline(None) as pipe, pytest.raises(LossError, match=r"tensor of shape \(3, 3\)(.|\n)*hint: .*loss_fn="):
        pipe.step(rows(7), target=TARGETS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_reduction": "none"}, "loss_reduction='none' was given; 'mean' or 'sum' is needed"),
        ({"on_nan": "stop"}, "on_nan='stop' was given; one of 'raise', 'skip', 'ignore' is needed"),
        ({"loss_fn": 3}, r"loss_fn=3 was given; a function loss_fn\(output, target\) is needed"),
        ({"loss_fn": nn.MSELoss}, r"loss_fn=MSELoss was given, a class.*\nhint: put \(\) behind it"),
        ({"loss_fn": mean_square, "loss_count": 3}, r"loss_count=3 was given; a function loss_count\(target\)"),
    ],
)
def test_options_that_do_not_exist(options, message):
    with pytest.raises(LossError, match=message):
        pl.Pipeline(chain(), **options)


def closure(head):
    return lambda output, target: (nn.functional.cross_entropy(head(output), target, reduction="sum"), len(target))


class Bound:
    """A trainer whose method is the loss."""

    def __init__(self, head):
        self.head = head

    def loss(self, output, target):
        return closure(self.head)(output, target)


class BoundModule(nn.Module):
    """A module of which another method is the loss."""

    def __init__(self, head):
        super().__init__()
        self.head = head
        self.loss = closure(self.head)

    def compute(self, output, target):
        return self.loss(output, target)


@pytest.mark.parametrize("make", [closure, lambda head: Bound(head).loss, lambda head: BoundModule(head).compute])
def test_head_that_a_loss_function_finds_around_it(make):
    """Its gradient stayed a sum where it had to become a mean, because only modules were looked into."""
    model, head = chain(), nn.Linear(3, 3)
    plain = copy.deepcopy(model)
    with pl.Pipeline(model, num_stages=3, num_microbatches=3, loss_fn=make(head)) as pipe:
        for _ in range(2):
            pipe.step(rows(7), target=TARGETS)
    expected = torch.autograd.grad(nn.functional.cross_entropy(head(plain(rows(7))), TARGETS), head.weight)[0]
    assert head.weight.grad.allclose(2 * expected, atol=1e-6)


@pytest.mark.parametrize("attempt", range(5))
def test_function_that_uses_a_weight_of_the_first_stage(attempt):
    """The first stage dropped what the loss had added to the weight's gradient before the stage's first backward."""
    model = linears(3)
    weight, plain = model[0].weight, copy.deepcopy(model)

    def loss_fn(output):
        return (output @ weight).square().sum(), output.numel()

    with pl.Pipeline(model, num_stages=3, num_microbatches=4, loss_fn=loss_fn) as pipe:
        pipe.step(rows(8))
    mean_square(plain(rows(8)) @ plain[0].weight).backward()
    assert weight.grad.allclose(plain[0].weight.grad, atol=1e-6)


@pytest.mark.parametrize("scale", [None, "2", [1.0], torch.ones(2)])
def test_loss_scale_that_is_no_number(scale):
    """The step ended on a rank's thread, in a sum of a text and a number."""
    with (
        pipeline(nn.CrossEntropyLoss()) as pipe,
        pytest.raises(LossError, match=r"loss_scale is a \w+.*a number[^$]*GradScaler"),
    ):
        pipe.step(rows(7), target=TARGETS, loss_scale=scale)


def test_gradient_scaler_of_torch():
    """As people train in float16; the scaler wants to have scaled something, so it is given a one."""
    with pipeline(nn.CrossEntropyLoss()) as pipe:
        pipe.step(rows(7), target=TARGETS)
        expected = [parameter.grad.clone() for parameter in pipe.parameters()]
        pipe.zero_grad()
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), pipe.optimizer(torch.optim.SGD)
        pipe.step(rows(7), target=TARGETS, loss_scale=scaler.scale(torch.ones(())))
        scaler.unscale_(optimizer)
        assert all(p.grad.allclose(e, atol=1e-6) for p, e in zip(pipe.parameters(), expected, strict=True))
        scaler.step(optimizer)


def poisoned(microbatch, value=math.nan):
    """7 rows in 3 micro-batches; one row of one micro-batch is not finite."""
    inputs = rows(7)
    inputs[(0, 3, 5)[microbatch]] = value
    return inputs


@pytest.mark.parametrize("loss_fn", [mean_square, lambda output: (output.square().sum(), output.numel())])
@pytest.mark.parametrize("microbatch", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite_raises(microbatch, value, loss_fn):
    with pipeline(loss_fn, linears(2)) as pipe:
        pipe.step(rows(7))
        before = gradients(pipe)
        with pytest.raises(NonFiniteLoss, match=f"step 1: the loss of micro-batch {microbatch} is (nan|inf)") as caught:
            pipe.step(poisoned(microbatch, value))
        assert (caught.value.step_index, caught.value.microbatch) == (1, microbatch)
        assert_same(gradients(pipe), before)
        assert pipe.step_index == 1


def test_loss_that_is_not_finite_is_skipped():
    with pipeline(mean_square, linears(2), on_nan="skip") as pipe:
        pipe.step(rows(7))
        before = gradients(pipe)
        assert pipe.step(poisoned(1)).isnan()
        assert_same(gradients(pipe), before)
        assert pipe.step_index == 2


def test_loss_that_is_not_finite_is_ignored():
    with pipeline(mean_square, linears(2), on_nan="ignore") as pipe:
        assert pipe.step(poisoned(1)).isnan()
        assert gradients(pipe)["0.weight"].isnan().any()


def test_batch_in_which_nothing_counts():
    target = torch.full((7,), -100)
    with pipeline(lambda o, t: (F.cross_entropy(o, t, reduction="sum"), (t != -100).sum())) as pipe:
        with pytest.raises(NonFiniteLoss, match="step 0: no target of the whole batch counts, so the loss is 0/0"):
            pipe.step(rows(7), target=target)
        assert all(gradient is None for gradient in gradients(pipe).values())


def test_sum_that_overflows():
    """Each micro-batch's loss is finite, their sum is not."""
    with pipeline(lambda output: output.sum() * 0 + 3e38, linears(2), loss_reduction="sum") as pipe:
        with pytest.raises(
            NonFiniteLoss, match="step 0: the losses of the micro-batches are finite, but add up to inf"
        ):
            pipe.step(rows(7))
        assert pipe.step_index == 0


@pytest.mark.parametrize("on_nan", ["raise", "skip"])
def test_running_statistics_survive_a_loss_that_is_not_finite(on_nan):
    model = chain(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with pipeline(mean_square, model, on_nan=on_nan, batch_norm="deferred") as pipe:
        try:
            pipe.step(poisoned(1))
        except NonFiniteLoss:
            assert on_nan == "raise"
        assert model[1].running_mean.isfinite().all()
        pipe.step(rows(7))
        assert model[1].num_batches_tracked == 1


def test_layers_track_again_after_a_failed_step():
    """A layer that a failed step left deferred would never again update its running statistics by itself."""

    def broken(output):
        raise ZeroDivisionError("of the loss")

    model = chain(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with pipeline(broken, model, batch_norm="deferred") as pipe:
        with pytest.raises(ZeroDivisionError, match="of the loss"):
            pipe.step(rows(7))
        assert model[1].num_batches_tracked == 0
        pipe.unwrap()(rows(7))
    assert model[1].num_batches_tracked == 1


class Tempered(nn.Module):
    """A loss with a parameter of its own, which is no part of the model."""

    def __init__(self, has_count):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.has_count = has_count

    def forward(self, output, target):
        loss = F.cross_entropy(output / self.temperature, target, reduction="sum" if self.has_count else "mean")
        return (loss, len(target)) if self.has_count else loss


@pytest.mark.parametrize("has_count", [False, True])
def test_loss_with_parameters(has_count):
    """Their gradients are scaled, and dropped, with those of the model."""
    loss_fn, plain = Tempered(has_count), Tempered(has_count=False)
    plain(chain()(rows(7)), TARGETS).backward()
    with pipeline(loss_fn) as pipe:
        pipe.step(rows(7), target=TARGETS)
        found = loss_fn.temperature.grad.clone()
        assert found.allclose(plain.temperature.grad)
        with pytest.raises(NonFiniteLoss, match="micro-batch 1 is nan"):
            pipe.step(poisoned(1), target=TARGETS)
        assert torch.equal(loss_fn.temperature.grad, found)
