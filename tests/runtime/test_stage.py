"""A stage calls the user's modules in order, each with its own random draws."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from pipeloom.runtime.draw_key import DrawKey
from pipeloom.runtime.draws import drawing
from pipeloom.runtime.stage import Stage
from pipeloom.splitting import split


def draws(microbatch=0):
    return lambda unit, call: drawing(DrawKey(0, 0, 0, microbatch, unit), call)


def stage_of(model, index=0, num_stages=1, **options):
    return Stage(index, split(model, num_stages=num_stages).stages[index], **options)


class Scaled(nn.Module):
    def forward(self, value, scale=1.0, *, shift=0.0):
        return value * scale + shift


def test_first_stage_takes_arguments():
    stage = stage_of(nn.Sequential(Scaled(), nn.Hardtanh(-100, 100)))
    assert stage(((torch.ones(2), 3.0), {"shift": 0.5}), draws()).tolist() == [3.5, 3.5]


def test_later_stages_take_one_value():
    units = split(nn.Sequential(nn.Identity(), Scaled(), Scaled()), cuts=[1]).stages[1]
    stage = Stage(1, units)
    assert stage(torch.ones(2), draws()).tolist() == [1.0, 1.0]
    assert [unit.name for unit in stage.units] == ["1", "2"]


def test_units_are_the_users_own_modules():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stage = stage_of(model)
    assert stage.units[0].module is model[0]
    assert next(stage.module.parameters()) is model[0].weight


def test_device_moves_the_module_in_place():
    model = nn.Sequential(nn.Linear(2, 2))
    weight = model[0].weight
    stage = stage_of(model, device=torch.device("cpu"))
    assert model[0].weight is weight
    assert stage.device == torch.device("cpu")
    assert stage_of(nn.Sequential(nn.Linear(2, 2)), device=torch.device("meta")).units[0].module.weight.is_meta


@pytest.mark.parametrize("microbatch", [0, 1])
def test_draws_are_a_function_of_the_keys(microbatch):
    stage = stage_of(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    value = ((torch.ones(64),), {})
    first, again = stage(value, draws(microbatch)), stage(value, draws(microbatch))
    assert torch.equal(first, again)
    assert not torch.equal(first, stage(value, draws(microbatch + 1)))


def test_each_unit_has_draws_of_its_own():
    seen = []
    stage = stage_of(nn.Sequential(nn.Identity(), nn.Identity()))
    stage(((torch.ones(1),), {}), lambda unit, call: seen.append((unit, call)) or nullcontext())
    assert seen == [("0", 0), ("1", 0)]
