"""Tensors that share memory across a cut, and layers that write into them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import BatchError
from tests.facade.models import (
    WIDTH,
    Calls,
    assert_pipelined_like_plain,
    assert_same,
    chain,
    gradients,
    mean_square,
    plain_loop,
    rows,
)

HALF = WIDTH // 2


def cut_after(packed, unpacked) -> nn.Sequential:
    """A cut at 2 goes between what ``packed`` returns and ``unpacked``."""
    return chain(nn.Linear(WIDTH, WIDTH), Calls(packed), Calls(unpacked), nn.Linear(WIDTH, 3))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "unpacked",
    [
        lambda v: v[0].mul_(2) + v[1],
        lambda v: v[0].sin() + v[1].cos() + v[0].tanh() * 3,
        lambda v: v[0] * (v[0] is v[1]),
    ],
)
def test_a_tensor_that_crosses_twice_is_one_tensor(unpacked, recompute) -> None:
    """A write into one of them did not reach the gradient of the other: off by a quarter, in silence."""
    model = cut_after(lambda x: (x * 2,) * 2, unpacked)
    assert_pipelined_like_plain(model, rows(8), cuts=[2], recompute=recompute)


OVERLAPS = {
    "a view and its base": (lambda x: (x[:, :HALF], x), lambda v: (v[0].mul_(2), v[1])[1]),
    "the base and a view": (lambda x: (x, x[:, :HALF]), lambda v: (v[1].mul_(2), v[0])[1]),
    "other strides": (lambda x: (x.t(), x), lambda v: (v[0].mul_(2), v[1])[1]),
    "windows": (lambda x: (x[:, :3], x[:, 1:]), lambda v: torch.cat([v[0].mul_(2)[:, :1], v[1]], 1)),
    "another dtype": (
        lambda x: (z := torch.complex(x, x), torch.view_as_real(z)),
        lambda v: (v[0].mul_(2), v[1].sum(-1))[1],
    ),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_a_write_into_overlapping_inputs_is_refused(name: str) -> None:
    with (
        pl.Pipeline(cut_after(*OVERLAPS[name]), cuts=[2], num_microbatches=2, loss_fn=mean_square) as pipe,
        pytest.raises(BatchError, match=r"wrote in place into one of its inputs.*share memory[^$]*hint: let the st"),
    ):
        pipe.step(rows(4))
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "unpacked",
    [
        lambda v: torch.cat([v[0].mul_(2), v[1]], 1),
        lambda v: torch.cat([v[0].mul_(2), v[1].add_(3)], 1),
    ],
)
def test_parts_of_a_tensor_may_be_written_into(unpacked, recompute) -> None:
    """They lie in one piece of memory, each in a place of its own."""
    model = cut_after(lambda x: ((y := x * 2)[:, :HALF], y[:, HALF:]), unpacked)
    assert_pipelined_like_plain(model, rows(8), cuts=[2], recompute=recompute)


def test_overlapping_masks_in_a_stage_that_recomputes() -> None:
    """Without gradients the write is harmless, until it is done again on copies."""
    model = cut_after(
        lambda x: (x, mask := torch.ones(len(x), WIDTH), mask[:, :HALF]), lambda v: (v[2].mul_(0), v[0] * v[1])[1]
    )
    assert_pipelined_like_plain(copy.deepcopy(model), rows(8), cuts=[2])
    with (
        pl.Pipeline(model, cuts=[2], num_microbatches=2, recompute=True, loss_fn=mean_square) as pipe,
        pytest.raises(BatchError, match="share memory"),
    ):
        pipe.step(rows(4))


HANDS_ON = (lambda x: (x, x.relu()), lambda v: v[0].sub_(1) * 0.5 + v[1])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_a_stage_hands_on_may_be_written_into(schedule: str) -> None:
    model = cut_after(*HANDS_ON)
    assert_pipelined_like_plain(model, rows(8), cuts=[1, 2], schedule=schedule)


def test_what_a_stage_recomputes_from_may_not() -> None:
    """It recomputed from what the next stage had made of its input: gradients were off by two thirds."""
    options = {"cuts": [1, 2], "schedule": "gpipe", "recompute": [False, True, False], "loss_fn": mean_square}
    with (
        pl.Pipeline(cut_after(*HANDS_ON), num_microbatches=2, **options) as pipe,
        pytest.raises(BatchError, match=r"recomputes was given float32\(2, 4\) and handed its memory on[^$]*hint: let"),
    ):
        pipe.step(rows(4))


def test_a_write_while_a_stage_recomputes_is_refused() -> None:
    """It was asked before the recompute only, and a rank that writes waits for nobody."""
    calls = []

    def written_at_the_second_call(x: Tensor) -> Tensor:
        calls.append(x)
        found = x * 2
        if len(calls) == 2:
            x.detach().add_(1)  # as another rank would: behind the back of this stage's autograd
        return found

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(written_at_the_second_call), nn.Linear(WIDTH, WIDTH))
    options = {"cuts": [1, 2], "recompute": [False, True, False], "loss_fn": mean_square}
    with (
        pl.Pipeline(layers, num_microbatches=1, **options) as pipe,
        pytest.raises(BatchError, match="handed its memory"),
    ):
        pipe.step(rows(4))


def test_recompute_beside_a_write_is_right_or_refused() -> None:
    """In 1F1B the recompute may come before the write, and is right then; it once was not asked again after it."""
    options = {"cuts": [1, 2], "schedule": "1f1b", "recompute": [False, True, False], "loss_fn": mean_square}
    plain = cut_after(*HANDS_ON)
    plain_loop(plain, [rows(4)], 2)
    for _ in range(20):
        with pl.Pipeline(cut_after(*HANDS_ON), num_microbatches=2, **options) as pipe:
            try:
                pipe.step(rows(4))
            except BatchError:
                continue
            assert_same(gradients(pipe), gradients(plain))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("in_place", [nn.Hardtanh(inplace=True), Calls(lambda x: x.sub_(1))])
def test_in_place_first_layer_of_the_model(in_place, schedule, recompute) -> None:
    """Micro-batches are views of one batch: each write seemed to spoil what the other micro-batches had saved."""
    model = chain(in_place, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    plain, given = copy.deepcopy(model), rows(8)
    options = {"schedule": schedule, "recompute": recompute, "loss_fn": mean_square}
    with pl.Pipeline(model, cuts=[2], num_microbatches=4, **options) as pipe:
        pipe.step(given)
    plain_loop(plain, [rows(8)], 4)
    assert torch.equal(model[1].weight.grad, plain[1].weight.grad)
    assert torch.equal(given, plain[0](rows(8)))


class Counts(nn.Module):
    """Returns a buffer that it writes in every forward, and one that it never does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, WIDTH) → that, and the buffers."""
        self.count += 1
        return x, self.count, self.table


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_buffers_that_a_stage_returns(schedule: str, recompute: bool) -> None:
    """The next rank read what a later micro-batch had written, if it was late."""
    model = chain(nn.Linear(WIDTH, WIDTH), Counts(), Calls(lambda v: v[0] * v[1] * v[2]), nn.Linear(WIDTH, 3))
    assert_pipelined_like_plain(model, rows(12), num_microbatches=6, cuts=[2], schedule=schedule, recompute=recompute)
