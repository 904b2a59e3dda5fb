"""Attributes that are a buffer or a weight under another name, or lie in its memory, under recomputation."""

import pytest
import torch
from torch import nn

import pipeloom as pl
from tests.runtime.test_plain_history import assert_recomputes_as_without


class Alias(nn.Module):
    """Scales by a buffer that it counts in, and that it has under two names."""

    def __init__(self, alias, read, write):
        super().__init__()
        self.linear, self.read, self.write = nn.Linear(4, 4), read, write
        self.register_buffer("count", torch.zeros(3))
        self.alias = alias(self.count)

    def forward(self, x):
        y = self.linear(x) * (1 + self.read(self).clone().sum())
        self.write(self).add_(1)
        return y


def by_name(module):
    return module.count


def by_alias(module):
    return module.alias["inner"][0] if isinstance(module.alias, dict) else module.alias


ALIASES = {
    "the same": lambda count: count,
    "detached": lambda count: count.detach(),
    "a part": lambda count: count[1:],
    "in a container": lambda count: {"inner": [count[:2]]},
}
USES = {"by name": (by_name, by_name), "read by alias": (by_alias, by_name), "written by alias": (by_name, by_alias)}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("recompute", [True, "[0-3]"])
def test_another_name_of_a_buffer_is_that_buffer_in_a_recompute(alias, use, recompute):
    """``self.alias = self.count`` was refused, and told to be registered, which it is.

    Left alone it would be what the buffer holds by then, and a write through it would be a second one.
    """
    assert_recomputes_as_without(lambda: Alias(ALIASES[alias], *USES[use]), f"{alias}, {use}", recompute)


def test_a_tuple_with_a_written_buffer_is_refused():
    """A tuple can't be given the buffer that a recompute reads."""
    model = nn.Sequential(*[Alias(lambda count: (count,), lambda m: m.alias[0], by_name) for _ in range(4)])
    options = {"num_stages": 2, "num_microbatches": 3, "schedule": "gpipe", "loss_fn": lambda y: y.square().mean()}
    with (
        pl.Pipeline(model, recompute=True, **options) as pipe,
        pytest.raises(pl.errors.RuntimeStateError, match="read the buffer by its name"),
    ):
        pipe.step(torch.randn(6, 4))


class ClipsWeight(nn.Module):
    """Writes its weight in the forward, as `max_norm` of an embedding does, and has it under another name."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = self.linear.weight.detach()

    def forward(self, x):
        if self.weight.abs().max() > 0.2:
            self.weight.clamp_(-0.2, 0.2)
        return self.linear(x) + self.weight.sum()


def test_another_name_of_a_weight_is_that_weight_in_a_recompute():
    """``self.w = self.weight.detach()`` was refused where the forward writes the weight; the weight itself isn't."""
    assert_recomputes_as_without(ClipsWeight, "a weight")
