"""Counters and generators of modules under recomputation: as without it."""

import copy
import random
from collections import OrderedDict, deque
from enum import Enum

import numpy as np
import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.runtime.plain_history import LOOKED_INTO, PlainHistory
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


def keep_state(module, y):
    """A tuple of tensors, as an LSTM's state."""
    y = y if not module.memory else y + module.memory[0].mean()
    module.memory = (y.detach(), len(module.memory))
    return y


def count_inside(module, y):
    """In a dict in a dict."""
    inner = module.__dict__.setdefault("counts", {"inner": {"calls": 0}})["inner"]
    inner["calls"] += 1
    return y * inner["calls"]


def count_deep(module, y):
    """In a list that a hundred others lie around, the innermost of which holds the outermost."""
    if not module.memory:
        module.memory = innermost = [0]
        for _ in range(100):
            module.memory = [module.memory]
        innermost.append(module.memory)
    inner = module.memory
    while isinstance(inner[0], list):
        inner = inner[0]
    inner[0] += 1
    return y * inner[0]


def keep_few(module, y):
    """In a deque in a tuple."""
    (few,) = module.__dict__.setdefault("few", (deque([0.5], maxlen=2),))
    few.append(y.detach().mean())
    return y * sum(few)


def count_among_many(module, y):
    """In a dict of which only the length is too much to look into all of it."""
    many = module.__dict__.setdefault("many", dict.fromkeys(range(2 * LOOKED_INTO), 0))
    many[0] += 1
    return y * many[0]


def keep_phase(module, y):
    """What never changes itself: a complex number, and a member of an enum."""
    module.phase = module.__dict__.get("phase", 1j) * 1j
    module.side = {Side.LEFT: Side.RIGHT}.get(module.__dict__.get("side"), Side.LEFT)
    return y * (2 + module.phase.real) * (2 if module.side is Side.LEFT else 1)


class Side(Enum):
    LEFT = "left"
    RIGHT = "right"


def keep_new(module, y):
    """In an attribute that was not there before."""
    y = y * 2 if hasattr(module, "seen") else y
    module.seen = True
    return y


KINDS = {
    "a counter": Counts,
    "a tensor": lambda: Remembers(remember),
    "a list": lambda: Remembers(append),
    "a tuple": lambda: Remembers(keep_state),
    "a dict in a dict": lambda: Remembers(count_inside),
    "a list in many": lambda: Remembers(count_deep),
    "a deque in a tuple": lambda: Remembers(keep_few),
    "a long dict": lambda: Remembers(count_among_many),
    "numbers and enums": lambda: Remembers(keep_phase),
    "a new attribute": lambda: Remembers(keep_new),
    "random.Random": lambda: Draws(random.Random(0), lambda generator: generator.random()),
    "numpy": lambda: Draws(np.random.default_rng(0), lambda generator: float(generator.random())),
    "numpy's older one": lambda: Draws(np.random.RandomState(0), lambda generator: float(generator.rand())),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_recompute_finds_what_its_forward_found(kind):
    """A counter was one further in each recompute, and a generator too: other gradients, without a word.

    So it was later with a counter in a dict in a dict, and with a tuple of tensors.
    """
    model = assert_recomputes_as_without(KINDS[kind], kind)
    if kind == "a counter":
        assert [layer.num_calls for layer in model] == [6] * 4


def assert_recomputes_as_without(make, label, recompute=True):
    """Loss and gradients of two steps with recompute are those without it, and so are buffers."""
    model, plain = four_of(make), four_of(make)
    x = torch.randn(6, 4)
    options = {"num_stages": 2, "num_microbatches": 3, "schedule": "gpipe", "loss_fn": lambda y: y.square().mean()}
    with pl.Pipeline(model, recompute=recompute, **options) as pipe, pl.Pipeline(plain, **options) as other:
        for _ in range(2):
            assert_bit_equal(pipe.step(x), other.step(x), "loss")
            for one, two in zip(pipe.parameters(), other.parameters(), strict=True):
                assert_bit_equal(one.grad, two.grad, label)
    for one, two in zip(model.buffers(), plain.buffers(), strict=True):
        assert_bit_equal(one, two, label)
    return model


def four_of(make):
    torch.manual_seed(0)
    return nn.Sequential(*[make() for _ in range(4)])


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


class WritesInside(nn.Module):
    """Writes in place into a tensor that lies in a container."""

    def __init__(self, make, get):
        super().__init__()
        self.linear, self.memory, self.get = nn.Linear(4, 4), make(torch.zeros(())), get

    def forward(self, x):
        memory = self.get(self.memory)
        y = self.linear(x) * (1 + memory.clone())
        memory.add_(1)
        return y


INSIDE = {
    "list": (lambda tensor: [tensor], lambda memory: memory[0]),
    "tuple": (lambda tensor: (0, tensor), lambda memory: memory[1]),
    "dict of lists": (lambda tensor: {"a": [tensor]}, lambda memory: memory["a"][0]),
}


@pytest.mark.parametrize("kind", INSIDE)
def test_a_tensor_written_in_a_container_is_refused_as_one_in_an_attribute_is(kind):
    """``self.memory[0].add_(1)`` gave the recompute what later micro-batches had written, without a word."""
    model = nn.Sequential(*[WritesInside(*INSIDE[kind]) for _ in range(4)])
    options = {"num_stages": 2, "num_microbatches": 3, "schedule": "gpipe", "loss_fn": lambda y: y.square().mean()}
    with (
        pl.Pipeline(model, recompute=True, **options) as pipe,
        pytest.raises(pl.errors.RuntimeStateError, match="'memory', and its forward writes into it in place"),
    ):
        pipe.step(torch.randn(6, 4))


class Pair(OrderedDict):
    """A dict whose constructor takes something else."""

    def __init__(self, first, second):
        super().__init__()
        self["first"], self["second"] = first, second

    def update(self, *_):
        raise TypeError("not by update")


class CountsInPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.pair = nn.Linear(4, 4), Pair(0, 1)

    def forward(self, x):
        self.pair["first"] += 1
        self.pair.move_to_end("first", last=self.pair["first"] % 2 == 0)
        return self.linear(x) * self.pair["first"] * (2 if next(iter(self.pair)) == "first" else 1)


def test_a_dict_of_its_own_class_is_put_back_without_its_constructor():
    """``copy()`` of an `OrderedDict` calls the class: a TypeError of it, with nothing of the model's in sight."""
    assert_recomputes_as_without(CountsInPair, "a pair")


def test_no_more_entries_are_looked_into_than_documented():
    """A vocabulary of 50,000 tuples would be gone through twice for each micro-batch; outer containers come first."""
    module = Remembers(append)
    module.memory = [[[] for _ in range(LOOKED_INTO)], [[]], [[[]]]]
    contents = [each.container for each in PlainHistory(module).now().contents]
    assert contents == [module.memory, *module.memory, [], [[]], []]
