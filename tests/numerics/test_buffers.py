"""Buffers that a forward reads and writes: a recompute reads what its forward read, whatever ran in between."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import pipeloom as pl
from tests.facade.models import WIDTH, chain, mean_square, plain_loop, rows
from tests.numerics.asserts import assert_same_gradients, assert_same_state


class Scaled(nn.Module):
    """Divides by a moving average of what it saw; ``is_rebound`` makes a new tensor of it each time."""

    def __init__(self, is_rebound: bool, period: int = 1) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_rebound = is_rebound
        self.period = period
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → the same."""
        scale = self.average.clone()
        self.calls += 1
        if self.calls % self.period == 0:
            new = self.average * 0.5 + x.detach().abs().mean(0)
            self.average = new if self.is_rebound else self.average.copy_(new)
        return self.linear(x) / scale


LAYERS = {
    "written in place": lambda: Scaled(is_rebound=False),
    "made anew": lambda: Scaled(is_rebound=True),
    "written now and then": lambda: Scaled(is_rebound=False, period=3),
    "spectral normalisation": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral normalisation by a hook": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "batch normalisation": lambda: nn.BatchNorm1d(WIDTH),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", LAYERS)
def test_buffers_that_a_forward_reads_and_writes(name: str, schedule: str, recompute: bool) -> None:
    """A spectrally normalised layer got gradients that were off by a quarter, because its recompute used the vectors
    of a later micro-batch."""
    model = chain(LAYERS[name](), nn.Tanh(), LAYERS[name](), nn.Linear(WIDTH, 3))
    plain = copy.deepcopy(model)
    options = {"schedule": schedule, "recompute": recompute, "loss_fn": mean_square}
    with pl.Pipeline(model, cuts=[2], num_microbatches=5, **options) as pipe:
        for _ in range(2):
            pipe.step(rows(10))
            plain_loop(plain, [rows(10)], 5)
        assert_same_gradients(pipe, plain)
        assert_same_state(pipe, plain)
