"""One module, called in several ways: its parts are units in all of its calls or in none."""

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import SplitError
from pipeloom.testing import sequential_step
from tests.splitting.test_random_models import assert_same


class Part(nn.Module):
    """Does more in one call than in another."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, other=None):
        hidden = x * self.second.weight[0] if other is x else torch.tanh(self.first(x))
        return hidden if other is None else hidden + self.second(other)


class Calls(nn.Module):
    """Has so many layers that a light call of the part is small enough for a unit, and a heavy one is not."""

    def __init__(self, ways, num_stages):
        super().__init__()
        self.part, self.unused = Part(), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(round(8.5 * num_stages) - 3))
        self.ways = ways

    def forward(self, x):
        for way in self.ways:
            x = self.part(x, *{"alone": (), "both": (x * 2,), "same": (x,)}[way])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("ways", [("alone", "both"), ("both", "alone"), ("same", "both"), ("alone", "same", "both")])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_module_that_does_less_in_one_call_is_cut_alike_in_all(ways, num_stages):
    """A random model was not cut, with KeyError: ('answers.second', 0). The module that was light in its first call
    was to be a unit, and parts of it too, because it was heavy in its second one; so a part was no call of a unit's.
    """
    torch.manual_seed(0)
    model, x = Calls(ways, num_stages), torch.randn(6, 8)
    options = {"num_stages": num_stages, "num_microbatches": 3, "loss_fn": nn.functional.mse_loss}
    oracle = copy.deepcopy(model)
    with pl.Pipeline(model, **options, schedule="zb-h1") as pipe:
        ours = pipe.step(x, target=x)
        pipe.unwrap()
    assert torch.equal(ours, sequential_step(oracle, x, **options, target=x))
    assert_same(model, oracle)


class Positions(nn.Module):
    """A child that knows no weights, and a weight of its own."""

    def __init__(self):
        super().__init__()
        self.ids, self.weight = nn.Identity(), nn.Parameter(torch.randn(10, 8))

    def forward(self, ids):
        return self.weight[self.ids(ids)]


def test_a_module_whose_parts_are_everywhere_is_not_opened_for_ever():
    """It has children, so it was looked into where there were too few units; but it stayed the same unit each time."""
    model = nn.Module()
    model.embed, model.head = Positions(), nn.Linear(8, 8)
    model.forward = lambda ids: model.head(model.embed(ids))
    with pytest.raises(SplitError, match="3"):
        pl.split(model, (torch.arange(4),), {}, num_stages=3)
