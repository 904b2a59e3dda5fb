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


class Remembers(nn.Module):
    """Adds what it keeps of its last call, as memories of a segment before do."""

    def __init__(self, keep):
        super().__init__()
        self.linear, self.keep, self.memory = nn.Linear(4, 4), keep, None if keep is remember else []

    def forward(self, x):
        y = self.linear(x)
        return self.keep(self, y)


def remember(module, y):
    y = y if module.memory is None else y + module.memory.mean()
    module.memory = y.detach()
    return y


def append(module, y):
    module.memory.append(y.detach().mean())
    return y * sum(module.memory)


def keep_new(module, y):
    """In an attribute that was not there before."""
    y = y * 2 if hasattr(module, "seen") else y
    module.seen = True
    return y


KINDS = {
    "a counter": Counts,
    "a tensor": lambda: Remembers(remember),
    "a list": lambda: Remembers(append),
    "a new attribute": lambda: Remembers(keep_new),
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


class Around(nn.Module):
    """A model that is cut by running it, and keeps something itself."""

    def __init__(self, keep):
        super().__init__()
        self.layers, self.keep, self.num_calls = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), keep, 0

    def forward(self, x):
        self.num_calls += 1
        for layer in self.layers:
            x = layer(x) * self.num_calls
        return x


def test_a_recompute_finds_what_its_forward_found_in_modules_around_units():
    """The model's own counter was one further in each recompute: other gradients, without a word."""
    torch.manual_seed(0)
    model, x = Around(None), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    options = {"num_stages": 2, "num_microbatches": 3, "schedule": "1f1b", "loss_fn": lambda y: y.square().mean()}
    with pl.Pipeline(model, recompute=True, **options) as pipe, pl.Pipeline(plain, **options) as other:
        for _ in range(2):
            assert_bit_equal(pipe.step(x), other.step(x), "loss")
            for one, two in zip(pipe.parameters(), other.parameters(), strict=True):
                assert_bit_equal(one.grad, two.grad, "a counter of the model")


class WritesInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.average = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x):
        y = self.linear(x)
        self.average.mul_(0.9).add_(y.detach().mean(0))
        return y + self.average


def test_a_tensor_that_is_no_buffer_and_written_in_place_is_refused_in_a_recompute():
    """What it was is gone by then; a buffer's history is kept."""
    model = nn.Sequential(*[WritesInPlace() for _ in range(4)])
    options = {"num_stages": 2, "num_microbatches": 3, "schedule": "gpipe", "loss_fn": lambda y: y.square().mean()}
    with (
        pl.Pipeline(model, recompute=True, **options) as pipe,
        pytest.raises(pl.errors.RuntimeStateError, match="'average', and its forward writes into it in place"),
    ):
        pipe.step(torch.randn(6, 4))
