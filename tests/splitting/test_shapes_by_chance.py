"""Shapes, and other values than tensors, that code around units draws by ``random`` or ``numpy.random``."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.chance import AROUND, key_draws
from pipeloom.runtime.draw_key import DrawKey
from pipeloom.runtime.draws import drawing
from tests.numerics.asserts import assert_bit_equal


@pytest.fixture(autouse=True)
def keyed():
    key_draws()
    yield
    key_draws(False)


def mean_square(output, target):
    return (output - target).square().mean()


class Layer(nn.Module):
    """Takes more than a tensor: how many positions it keeps."""

    def __init__(self):
        super().__init__()
        self.linear, self.num_kept = nn.Linear(4, 4), 6

    def forward(self, x, num_kept=None, start=None):
        x = self.linear(x if start is None else start.expand(len(x), -1, -1) + x.mean())
        return x[:, : num_kept or self.num_kept]


class Crops(nn.Module):
    """Does something by chance between its layers, and divides by a size that follows from it."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.c = Layer(), Layer(), Layer()
        self.change = change

    def forward(self, x):
        x = self.change(self, self.a(x))
        size = x.shape[1]
        x = self.c(self.b(x))
        return x.sum(1) / size


def crop(_, x):
    return x[:, : random.randint(2, 5)]


def choose(_, x):
    return x[:, np.random.permutation(6)[: np.random.randint(2, 6)]]


def mask(_, x):
    return x[:, torch.from_numpy(np.random.rand(6) < 0.6)]


def split(_, x):
    return x.split(random.randint(1, 5), dim=1)[0]


def scale(_, x):
    return nn.functional.interpolate(x.transpose(1, 2), scale_factor=random.uniform(0.4, 2)).transpose(1, 2)


def tell(model, x):
    return model.b(x, random.randint(2, 5))


def tell_by_numpy(model, x):
    return model.b(x, num_kept=np.random.randint(2, 6))


def begin(model, x):
    return model.b(x, start=torch.ones(1, random.randint(2, 5), 4))


def put(model, x):
    model.b.num_kept = random.randint(2, 5)
    return model.b(x)


def multiply(_, x):
    return x * random.random() + random.randint(2, 5)


CHANGES = [crop, choose, mask, split, scale, tell, tell_by_numpy, begin, put, multiply]


def looped(model, x, target, num_microbatches=4):
    """The same step by hand: no cut, no plan, the same draws."""
    loss = 0.0
    for microbatch, (part, wanted) in enumerate(
        zip(x.chunk(num_microbatches), target.chunk(num_microbatches), strict=True)
    ):
        with drawing(DrawKey(0, 0, 0, microbatch, AROUND)):
            each = mean_square(model(part), wanted) / num_microbatches
        each.backward()
        loss += each.detach()
    return loss


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_shapes_that_are_drawn(change, num_stages):
    """A crop by `random.randint` had, on other stages, the size that it had in the dry run: the mean was another one.

    Nobody said so, and the oracle, which runs the same plan, agreed.
    """
    torch.manual_seed(0)
    model, x, target = Crops(change), torch.randn(8, 6, 4), torch.randn(8, 4)
    reference = copy.deepcopy(model)
    expected = looped(reference, x, target)
    with pl.Pipeline(model, num_stages=num_stages, num_microbatches=4, loss_fn=mean_square) as pipe:
        torch.testing.assert_close(pipe.step(x, target=target), expected)
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.parametrize("is_drawn", [True, False])
def test_what_a_mask_leaves(is_drawn):
    """How many positions a mask leaves was another number on each micro-batch, but one for all stages: the first."""

    class Masked(Crops):
        def forward(self, x, mask):
            x = self.a(x)
            x = x[:, torch.rand(6) < 0.6 if is_drawn else mask[0]]
            size = x.shape[1]
            return self.c(self.b(x)).sum(1) / size

    model = Masked(None)
    nn.init.zeros_(model.c.linear.weight)
    nn.init.ones_(model.c.linear.bias)
    mask = torch.tensor([[i != j and i % 4 <= j for j in range(6)] for i in range(8)])
    with pl.Pipeline(model, num_stages=3, num_microbatches=8, loss_fn=mean_square) as pipe:
        loss = pipe.step(torch.randn(8, 6, 4), mask, target=torch.ones(8, 4))
    assert_bit_equal(loss, torch.tensor(0.0), "loss")


class Mapped(Crops):
    """Draws within a function that `torch.vmap` maps, which one stage only runs."""

    def forward(self, x):
        x = torch.vmap(lambda each: each * random.random())(self.b(self.a(x)))
        drawn = random.random()
        x = x * 0 + drawn
        return self.c(x).sum(1) * 0 + x[:, 0] - drawn


def test_draws_within_a_mapped_function():
    """The stage that ran it drew once more than the others, and had other numbers from there on."""
    with pl.Pipeline(Mapped(None), num_stages=3, num_microbatches=4, loss_fn=mean_square) as pipe:
        assert_bit_equal(pipe.step(torch.randn(8, 6, 4), target=torch.zeros(8, 4)), torch.tensor(0.0), "loss")
