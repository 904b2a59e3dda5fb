"""Stages that write into their input only sometimes: the pipeline finds out, and the numbers stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from tests.facade.models import WIDTH, chain, mean_square, plain_loop, rows


class Sometimes(nn.Module):
    """Writes into its input after its first calls."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.num_calls, self.first = 0, first

    def forward(self, value):
        self.num_calls += 1
        return value.tanh_() * 2 if self.num_calls > self.first else value.tanh() * 2


def cut_before(layer: nn.Module) -> nn.Sequential:
    return chain(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("first", [0, 1, 2, 3, 6])
def test_a_write_that_begins_at_any_call_changes_no_number(first: int, recompute: bool) -> None:
    model = cut_before(Sometimes(first))
    plain = copy.deepcopy(model)
    options = {"cuts": [1, 3], "num_microbatches": 4, "recompute": recompute, "loss_fn": mean_square}
    with pl.Pipeline(model, **options) as pipe:
        for _ in range(2):
            assert torch.equal(pipe.step(rows(8)), plain_loop(plain, [rows(8)], 4))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_that_hand_their_input_on(schedule: str) -> None:
    """The collector of a stage's gradient is then the output that its backward starts from."""
    model = chain(nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Flatten(0, 0), nn.ReLU(inplace=True), nn.Linear(WIDTH, 3))
    plain = copy.deepcopy(model)
    with pl.Pipeline(model, cuts=[1, 2, 3], schedule=schedule, num_microbatches=4, loss_fn=mean_square) as pipe:
        for _ in range(2):
            pipe.step(rows(8))
            plain_loop(plain, [rows(8)], 4)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_users_write_into_a_parameter_is_still_an_error() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.num_calls = nn.Parameter(torch.ones(WIDTH)), 0

        def forward(self, value):
            self.num_calls += 1
            return value * (self.weight.mul_(2) if self.num_calls > 2 else self.weight)

    with (
        pl.Pipeline(cut_before(Careless()), cuts=[1, 3], num_microbatches=4, loss_fn=mean_square) as pipe,
        pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"),
    ):
        pipe.step(rows(8))
