"""What cannot run in two replicas of the model is refused by name; what only looks like that runs."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import pipeloom as pl
from pipeloom.errors import LossError, SplitError
from tests.runtime.test_every_schedule import WIDTH, chain, square
from tests.runtime.test_two_replicas import assert_steps_equal_the_oracle, layers, rows


class Counts(nn.Module):
    """Writes a buffer, in place or by putting another one there."""

    def __init__(self, is_in_place):
        super().__init__()
        self.linear, self.is_in_place = nn.Linear(WIDTH, WIDTH), is_in_place
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.is_in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return self.linear(x)


class Renormed(nn.Module):
    """An embedding that is kept short writes into its weight before it is used."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH, max_norm=0.5)

    def forward(self, x):
        return self.embedding(x.argmax(-1)) + x


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.Sequential(*(Renormed() for _ in range(4))), "wrote the weight 'weight' of a Embedding"),
        (chain, "'1' is a BatchNorm1d that keeps running statistics"),
        (lambda: nn.Sequential(*(Counts(i == 2) for i in range(4))), "wrote the buffer 'calls' of a Counts"),
        (lambda: nn.Sequential(*(spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4))), "wrote the buffer '_u'"),
    ],
    ids=["embedding", "batch norm", "a counter", "spectral norm"],
)
def test_forwards_that_write_what_both_replicas_have_are_refused(make, match):
    model, (x, target) = make(), rows()
    with pl.Pipeline(model, schedule="chimera", num_stages=4, num_microbatches=4, loss_fn=square) as pipe:
        with pytest.raises(SplitError, match=rf"(?s){match}.*hint: .*single replica"):
            pipe.step(x, target=target)
        assert all(each.grad is None for each in pipe.parameters())
        model.eval()
        if make is chain:
            pipe.step(x, target=target)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_modules_that_have_no_second_leaves_are_refused():
    options = {"schedule": "chimera", "num_stages": 4, "loss_fn": square}
    scripted = nn.Sequential(*(torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.ones(1, WIDTH)) for _ in range(4)))
    with pytest.raises(SplitError, match="'0' is a module of TorchScript"):
        pl.Pipeline(scripted, **options)
    lazy = nn.Sequential(*(nn.LazyLinear(WIDTH) for _ in range(4)))
    with pytest.raises(SplitError, match=r"(?s)'0' is a lazy LazyLinear.*hint: call the model once before"):
        pl.Pipeline(lazy, cuts=[1, 2, 3], **options | {"num_stages": None})


class Box:
    """No module."""

    def __init__(self, inner):
        self.inner = inner

    def found(self):
        return self.inner


class Other(nn.Module):
    """No module of the model, and no part of it is registered here."""

    def __init__(self, inner):
        super().__init__()
        self.inner = [inner]


class Boxes(nn.Module):
    """Keeps something where no clone is led."""

    def __init__(self, make):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.box = make(self.linear)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Box, "'linear' in its attribute 'box', inside of a Box"),
        (lambda linear: {"one": Box([linear])}, "'linear' in its attribute 'box', inside of a dict"),
        (lambda linear: [(linear.weight,)], "'linear.weight' in its attribute 'box', inside of a list"),
        (
            lambda linear: lambda weight=linear.weight: weight,
            "'linear.weight' in its attribute 'box', inside of a function",
        ),
        (lambda linear: Box(linear).found, "'linear' in its attribute 'box', inside of a method"),
        (
            lambda linear: partial(max, 1, key=[linear.bias]),
            "'linear.bias' in its attribute 'box', inside of a partial",
        ),
        (lambda linear: Other(linear).forward, "'linear' in its attribute 'box', inside of a method"),
    ],
    ids=["a module", "nested", "a weight", "closure", "method", "partial", "method of another module"],
)
def test_what_objects_of_the_users_hold_is_refused(make, found):
    """The second replica ran the first one's layer, whose gradient two threads added up: nothing said so."""
    model = nn.Sequential(*(Boxes(make) for _ in range(4)))
    with pytest.raises(SplitError, match=f"'0' has '0.{found[1:]}; the schedule runs two replicas"):
        pl.Pipeline(model, schedule="chimera", num_stages=4, loss_fn=square)


def test_lists_of_modules_and_weights_are_led_to_those_of_the_replica():
    model = nn.Sequential(
        *(Boxes(lambda linear: [linear, linear.weight, (linear,), {"linear": linear}]) for _ in range(4))
    )
    assert_steps_equal_the_oracle(model, "chimera", rows, square, num_stages=4, num_microbatches=4)


def test_a_loss_around_which_weights_lie_is_refused():
    weight = nn.Parameter(torch.ones(WIDTH))

    def loss_fn(output, target):
        return (output * weight - target).square().mean()

    with pytest.raises(LossError, match=r"(?s)uses weights that it finds around it.*hint: make it a module"):
        pl.Pipeline(layers(), schedule="chimera", num_stages=4, loss_fn=loss_fn)
