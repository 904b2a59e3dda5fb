"""Weights of micro-batches, seeds of their backwards, and the loss of the batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pipeloom.batch.losses import LossRule
from pipeloom.errors import LossError

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def step_loss(loss_fn, num_samples, targets=None, scale=1.0, **options):
    targets = [torch.ones(n) for n in num_samples] if targets is None else targets
    return LossRule(loss_fn, **options).for_step(num_samples, targets, scale)


def value(number):
    return torch.tensor(float(number), requires_grad=True)


@given(sizes)
def test_seeds_of_a_mean_are_shares_of_rows(num_samples):
    loss = step_loss(lambda output: output, num_samples)
    seeds = [loss.seed(i) for i in range(len(num_samples))]
    assert math.fsum(seeds) == pytest.approx(1)
    assert seeds[0] == num_samples[0] / sum(num_samples)


@given(sizes, st.floats(0.1, 100))
def test_total_is_the_mean_over_all_rows(num_samples, scale):
    loss = step_loss(lambda output: output, num_samples, scale=scale)
    for i in range(len(num_samples)):
        loss.compute(i, value(i + 1), None)
    expected = sum(n * (i + 1) for i, n in enumerate(num_samples)) / sum(num_samples)
    assert loss.total().item() == pytest.approx(expected, rel=1e-5)
    assert math.fsum(loss.seed(i) for i in range(len(num_samples))) == pytest.approx(scale)


@given(sizes)
def test_counts_known_before_give_final_seeds(counts):
    loss = step_loss(lambda output: output, [1] * len(counts), targets=counts, count=lambda target: target)
    for i, count in enumerate(counts):
        loss.compute(i, value(count), None)
    assert not loss.is_deferred
    assert loss.seed(0) == pytest.approx(counts[0] / sum(counts))
    assert loss.total().item() == pytest.approx(sum(c * c for c in counts) / sum(counts), rel=1e-5)


@given(sizes, st.booleans())
def test_sums_with_counts_are_one_mean(counts, is_known):
    rule = {"count": lambda target: target} if is_known else {}
    loss = step_loss(lambda output, target: (output * target, target), [1] * len(counts), targets=counts, **rule)
    for i, count in enumerate(counts):
        loss.compute(i, value(i + 1), count)
    expected = sum((i + 1) * count for i, count in enumerate(counts)) / sum(counts)
    assert loss.is_deferred is not is_known
    assert loss.total().item() == pytest.approx(expected, rel=1e-5)
    assert loss.seed(0) * (loss.final_scale if loss.is_deferred else 1) == pytest.approx(1 / sum(counts))


def test_sums_have_seeds_of_one():
    loss = step_loss(lambda output: output, [3, 1], reduction="sum", scale=2.0)
    loss.compute(0, value(5), None)
    loss.compute(1, value(7), None)
    assert loss.total().item() == 12
    assert (loss.seed(0), loss.seed(1)) == (2.0, 2.0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_total_does_not_depend_on_the_order_of_arrival(order):
    loss = step_loss(lambda output: output, [2, 2, 2])
    for i in order:
        loss.compute(i, value(10.0**i + 0.1), None)
    assert loss.total().equal(sum(torch.tensor(10.0**i + 0.1) / 3 for i in range(3)))
    assert sorted(loss.values) == [0, 1, 2]


def test_values_keep_no_graph():
    loss = step_loss(lambda output: output * 2, [1])
    computed = loss.compute(0, value(3), None)
    assert computed.requires_grad
    assert not loss.values[0].requires_grad
    assert not loss.total().requires_grad


def test_nothing_counted_is_not_a_number():
    loss = step_loss(lambda output, target: (output, 0), [1, 1])
    loss.compute(0, value(0), torch.ones(1))
    loss.compute(1, value(0), torch.ones(1))
    assert loss.total().isnan()
    assert "no target of the whole batch counts" in str(loss.non_finite(4))


@pytest.mark.parametrize(
    ("loss_fn", "needs_target"),
    [
        (nn.MSELoss(), True),
        (F.mse_loss, True),
        (lambda output: output, False),
        (lambda output, target: output, True),
        (lambda output, target=None: output, False),
        (lambda *values: values[0], False),
        (torch.mean, False),
        (None, False),
    ],
)
def test_who_needs_a_target(loss_fn, needs_target):
    rule = LossRule(loss_fn)
    if needs_target:
        with pytest.raises(LossError, match="no target was given, and the loss function needs one"):
            rule.for_step([1], [None], 1.0)
    else:
        assert rule.for_step([1], [None], 1.0).num_samples == [1]


@pytest.mark.parametrize("count", ["many", torch.ones(3), None, [1, 2]])
def test_counts_that_are_no_numbers(count):
    with pytest.raises(LossError, match=r"the count of micro-batch 0 is a .*; a number is needed"):
        step_loss(lambda output: output, [1], count=lambda target: count)


def test_count_attribute_that_is_no_function_is_left_alone():
    """A module may have a buffer of that name."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.tensor(3))

        def forward(self, output, target):
            return (output - target).mean()

    assert step_loss(Loss(), [2, 2]).counts is None
    assert step_loss(Loss(), [2, 2]).seed(0) == 0.5


def test_targets_in_containers_bring_no_graph():
    with pytest.raises(LossError, match="the target requires a gradient"):
        step_loss(lambda output, target: output, [1], targets=[{"soft": [torch.ones(1, requires_grad=True)]}])


@pytest.mark.parametrize("last", [7.0, float("nan"), float("inf")])
def test_a_total_that_was_added_up_early_is_the_same(last):
    early, late = (step_loss(lambda output: output, [3, 1]) for _ in range(2))
    for loss in (early, late):
        loss.compute(0, value(5.1), None)
        loss.compute(1, value(last), None)
    early.add_up()
    assert torch.equal(early.total().nan_to_num(), late.total().nan_to_num())
    assert early.is_finite is late.is_finite is (last == 7.0)
