"""Models whose code draws by Python's ``random`` and ``numpy.random``: keyed, as the oracle's, whoever runs what."""

import copy
import random
from random import random as bound_random

import numpy as np
import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.chance import key_draws
from pipeloom.errors import DrawError
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients

DRAWS = [
    lambda: random.random(),
    lambda: random.gauss(0, 1),
    lambda: np.random.rand(1).item(),
    lambda: np.random.uniform(0, 1),
    lambda: np.random.ranf(),
]


bound_rand = np.random.rand


@pytest.fixture(autouse=True)
def keyed():
    key_draws()
    yield
    key_draws(False)


def square(output):
    return output.square().mean()


class Chance(nn.Module):
    """Layers, and something that is done by chance around them."""

    def __init__(self, draw, num_layers=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))
        self.draw = draw


class Masks(Chance):
    """Masks features, as wav2vec 2.0 does in training by default: a mask that numpy draws."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
            mask = np.array([self.draw() < 0.3 for _ in range(x.shape[-1])])
            if self.training:
                x = x.masked_fill(torch.from_numpy(mask), 0.5)
        return x


class Drops(Chance):
    """Skips layers, also the last one, as VITS does."""

    def forward(self, x):
        for layer in self.layers:
            if not self.training or self.draw() < 0.6:
                x = layer(x).tanh()
        return x


class Chooses(Chance):
    """Takes one of two values, and calls the same functions for both."""

    def forward(self, x):
        for layer, other in zip(self.layers[::2], self.layers[1::2], strict=True):
            both = layer(x).tanh(), other(x).tanh()
            x = both[self.draw() < 0.5] * 1.0
        return x


class Blocks(nn.Module):
    """Attends to blocks that numpy chooses, within a layer, as BigBird does."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x):
        chosen = self.draw() < 0.5
        return (self.linear(x) * chosen).tanh()


class Sparse(Chance):
    def __init__(self, draw):
        super().__init__(draw)
        self.layers = nn.ModuleList(Blocks(draw) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def assert_like_the_oracle(model, num_stages, num_steps=4, **options):
    x, reference = torch.randn(8, 8), copy.deepcopy(model)
    given = {"num_stages": num_stages, "num_microbatches": 4, "loss_fn": square}
    losses = set()
    with pl.Pipeline(model, seed=5, **given, **options) as pipe:
        for step_index in range(num_steps):
            found = pipe.step(x)
            assert_bit_equal(found, sequential_step(reference, x, seed=5, step_index=step_index, **given), "loss")
            losses.add(found.item())
            assert_same_gradients(pipe, reference)
    assert len(losses) == num_steps  # each step draws its own numbers


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("kind", [Masks, Drops, Chooses, Sparse])
@pytest.mark.parametrize("draw", DRAWS)
def test_each_stage_draws_the_same(draw, kind, num_stages):
    """Both generators belong to the process: wav2vec 2.0, HuBERT and BigBird were refused for drawing from them."""
    torch.manual_seed(0)
    assert_like_the_oracle(kind(draw), num_stages)


@pytest.mark.parametrize("kind", [Masks, Sparse])
def test_a_recompute_draws_what_the_forward_drew(kind):
    torch.manual_seed(0)
    assert_like_the_oracle(kind(DRAWS[2]), 2, recompute=True)


def test_a_chain():
    """Of an `nn.Sequential` no code around units is run, only layers."""
    torch.manual_seed(0)
    assert_like_the_oracle(nn.Sequential(*(Blocks(DRAWS[0]) for _ in range(4))), 2)


def test_an_unpipelined_run_draws_the_same():
    torch.manual_seed(0)
    for kind in (Masks, Drops, Sparse):
        with pl.Pipeline(kind(DRAWS[3]), num_stages=2, num_microbatches=2, loss_fn=square, verify=True) as pipe:
            assert pipe.step(torch.randn(4, 8)).isfinite()


def test_the_users_own_numbers_go_on():
    """Neither cutting a model nor training it takes one of the numbers that a program draws for itself."""
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    for draw in DRAWS:
        with pl.Pipeline(Masks(draw), num_stages=2, num_microbatches=2, loss_fn=square) as pipe:
            pipe.step(torch.randn(4, 8))
    assert (random.random(), np.random.rand()) == expected


class Checkpointed(nn.Module):
    """Runs its layer again in the backward."""

    def __init__(self, draw, **options):
        super().__init__()
        self.linear, self.draw, self.options = nn.Linear(8, 8), draw, options

    def forward(self, x):
        if not self.options:
            return self.inner(x)
        return torch.utils.checkpoint.checkpoint(self.inner, x, **self.options)

    def inner(self, x):
        return self.linear(x * self.draw()).tanh() * self.draw()


def seeded():
    random.seed(3)
    np.random.seed(3)
    return random.random() + np.random.rand()


def other_seeded():
    random.seed(3)
    return np.random.rand()


KEPT = [{"use_reentrant": False}, {"use_reentrant": True}]
LOST = [{**each, "preserve_rng_state": False} for each in KEPT]


@pytest.mark.parametrize("options", KEPT)
@pytest.mark.parametrize("draws", [DRAWS[:2], [DRAWS[2], seeded], [seeded, DRAWS[0]], [other_seeded, DRAWS[4]]])
def test_a_checkpoint_draws_what_its_forward_drew(draws, options):
    """One layer that seeded itself let all others of its stage draw: other numbers than in their forwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(Checkpointed(draw, **options) for draw in draws))
    plain = copy.deepcopy(model)
    for layer in plain[1:]:
        layer.options = {}
    x, given = torch.randn(8, 8), {"num_microbatches": 2, "loss_fn": square}
    with pl.Pipeline(model, cuts=[1], **given) as pipe:
        assert_bit_equal(pipe.step(x), sequential_step(plain, x, **given), "loss")
        assert_same_gradients(pipe, plain)


class CheckpointedAround(Sparse):
    """Its own code has its layers run again in the backward, as transformers' gradient checkpointing does."""

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.utils.checkpoint.checkpoint(nn.Module.__call__, layer, x * self.draw(), use_reentrant=False)
        return x


@pytest.mark.parametrize("draw", [DRAWS[0], DRAWS[3]])
def test_a_checkpoint_around_layers_draws_what_their_forward_drew(draw):
    torch.manual_seed(0)
    assert_like_the_oracle(CheckpointedAround(draw), 2)


def test_modules_that_are_recomputed_by_name_draw_the_same():
    torch.manual_seed(0)
    assert_like_the_oracle(nn.Sequential(*(Blocks(draw) for draw in DRAWS[:4])), 2, recompute="*")


@pytest.mark.parametrize("options", LOST)
@pytest.mark.parametrize("draw", [DRAWS[0], DRAWS[2], seeded, other_seeded])
def test_draws_in_a_backward_are_refused(draw, options):
    """A checkpoint that is told to keep no random state draws others than its forward did, and nobody would say so."""
    model = nn.Sequential(nn.Linear(8, 8), Checkpointed(draw, **options))
    pipe = pl.Pipeline(model, cuts=[1], num_microbatches=2, loss_fn=square)
    with pipe, pytest.raises(DrawError, match=r"the backward of stage 1 drew from Python's `random` or numpy's"):
        pipe.step(torch.randn(4, 8))


@pytest.mark.parametrize("kind", [Masks, Sparse])
@pytest.mark.parametrize("draw", [lambda: bound_random(), lambda: bound_rand()])
def test_what_no_stand_in_reaches_is_refused(draw, kind):
    pipe = pl.Pipeline(kind(draw), num_stages=2, num_microbatches=2, loss_fn=square)
    with pipe, pytest.raises(DrawError, match=r"key_draws\(\) does not reach a function that was imported by name"):
        pipe.step(torch.randn(4, 8))


@pytest.mark.parametrize("kind", [Masks, Sparse])
@pytest.mark.parametrize("draw", DRAWS)
def test_without_being_asked_for_it_is_refused(draw, kind):
    """And the refusal's remedy works."""
    key_draws(False)
    model, x = kind(draw), torch.randn(4, 8)
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=2, loss_fn=square)
    with pipe, pytest.raises(DrawError, match=r"call pipeloom\.chance\.key_draws\(\) before the pipeline is made"):
        pipe.step(x)
    key_draws()
    with pl.Pipeline(model, num_stages=2, num_microbatches=2, loss_fn=square) as pipe:
        assert pipe.step(x).isfinite()
