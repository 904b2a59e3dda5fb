"""Counters and generators of modules under recomputation: as without it."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import pipeloom as pl
from tests.numerics.asserts import assert_bit_equal


class Counts(nn.Module):
    """Scales by how often it ran."""

    def __init__(self):
        super().__init__()
        self.linear, self.num_calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.num_calls += 1
        return self.linear(x) * self.num_calls


class Draws(nn.Module):
    """Scales by a number of its own generator."""

    def __init__(self, generator, draw):
        super().__init__()
        self.linear, self.generator, self.draw = nn.Linear(4, 4), generator, draw

    def forward(self, x):
        return self.linear(x) * self.draw(self.generator)


KINDS = {
    "a counter": Counts,
    "random.Random": lambda: Draws(random.Random(0), lambda generator: generator.random()),
    "numpy": lambda: Draws(np.random.default_rng(0), lambda generator: float(generator.random())),
    "numpy's older one": lambda: Draws(np.random.RandomState(0), lambda generator: float(generator.rand())),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_recompute_finds_what_its_forward_found(kind):
    """A counter was one further in each recompute, and a generator too: other gradients, without a word."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[KINDS[kind]() for _ in range(4)]), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    options = {"num_stages": 2, "num_microbatches": 3, "schedule": "gpipe", "loss_fn": lambda y: y.square().mean()}
    with pl.Pipeline(model, recompute=True, **options) as pipe, pl.Pipeline(plain, **options) as other:
        for _ in range(2):
            assert_bit_equal(pipe.step(x), other.step(x), "loss")
            for one, two in zip(pipe.parameters(), other.parameters(), strict=True):
                assert_bit_equal(one.grad, two.grad, kind)
    if kind == "a counter":
        assert [layer.num_calls for layer in model] == [6] * 4
