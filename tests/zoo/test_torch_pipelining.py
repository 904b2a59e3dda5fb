"""The benchmark that asks torch's own `pipeline()`: what it is given, and what it is held against."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.zoo import torch_pipelining as asked

ROOT = Path(__file__).parents[2]


class Blocks(nn.Module):
    """Six equal layers in a list, between two others, the last of which calls one of them again."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.after = nn.Linear(4, 4)
        self.dropout = 0.5

    def forward(self, x):
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.layers[5](self.after(nn.functional.dropout(x, self.dropout)))


@pytest.mark.parametrize(("num_stages", "cuts"), [(2, [3]), (3, [1, 4]), (4, [0, 2, 4])])
def test_cuts_balance_the_members_of_a_list(num_stages, cuts):
    found = asked.split_points(Blocks(), {"x": torch.ones(2, 4)}, num_stages)
    assert found == [f"layers.{cut}" for cut in cuts]


def test_a_module_that_is_called_twice_is_no_place_for_a_cut():
    starts = asked.called_modules(Blocks(), {"x": torch.ones(2, 4)})
    assert "layers.5" not in starts
    assert starts["layers.0"] == 20
    assert starts["after"] == 7 * 20


def test_dropout_ends_as_a_module_and_as_a_number():
    model = nn.Sequential(Blocks(), nn.Dropout(0.3))
    asked.without_dropout(model)
    assert (model[0].dropout, model[1].p) == (0.0, 0.0)
    inputs = torch.ones(2, 4)
    assert torch.equal(model(inputs), model(inputs))


def test_of_a_tied_weight_the_worst_copy_counts_and_of_an_absent_one_all():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    model[1].weight = model[0].weight
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stages = [{"grads": {"0.weight": torch.ones(2, 2)}}, {"grads": {"1.weight": torch.full((2, 2), 0.25)}}]
    assert list(asked.differences(stages, model)) == [(0.75, "0.weight = 1.weight"), (1.0, "2.weight")]


TRAINED = {"traces": True, "splits": True, "trains": True, "loss_off": 0.0}
VERDICTS = [
    ({"traces": False}, "does not trace"),
    ({"trains": False}, "does not train"),
    ({"splits": False, "num_stages": 3}, "3 stages"),
    ({"splits": False}, "does not split"),
    ({"worst_gradient_off": 0.8712}, "gradients off by 87 %"),
    ({"worst_gradient_off": 0.0, "loss_off": 0.25}, "gradients off by 25 %"),
    ({"worst_gradient_off": 0.0}, "equal to the bit"),
    ({"worst_gradient_off": 3e-7}, "equal to 3e-07"),
]


@pytest.mark.parametrize(("found", "words"), VERDICTS)
def test_a_row_says_the_first_thing_that_failed(found, words):
    assert asked.verdict(TRAINED | found) == words


def test_the_table_has_a_line_for_each_model():
    common = {"model": "m", "is_loss_inside": True}
    rows = [
        common | TRAINED | {"asked_stages": 2, "worst_gradient_off": 0.0},
        common | TRAINED | {"asked_stages": 3, "trains": False, "error": "no skips"},
    ]
    assert asked.table(rows, [2, 3]).splitlines()[2:] == [
        "| m | equal to the bit | does not train | inside | no skips |"
    ]


def test_torch_is_asked_about_a_real_model():
    command = [sys.executable, "-m", "benchmarks.zoo.torch_pipelining", "--json", "--stages", "2", "--models"]
    ran = subprocess.run([*command, "nn.Transformer (enc-dec)"], cwd=ROOT, capture_output=True, text=True, check=True)
    row = json.loads(ran.stdout)
    assert row["traces"]
    assert row["split_s"] > 0
    assert row["cuts"][0].partition(".layers.")[0] in ("encoder", "decoder")
