"""Which modules are units."""

import torch
from torch import nn

from pipeloom.recording.dry_run import DryRun
from pipeloom.splitting.choose import Weights, choose_units, count, skipped


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Model(nn.Module):
    def __init__(self, num_layers=4, width=8):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 10)
        self.branch = Layer(width)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width))])

    def forward(self, ids, has_branch=False):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.branch(x) if has_branch else x
        return self.head(x * self.scales[0])


def surveyed(model, **kwargs):
    run = DryRun(model, None, set())
    run.run((torch.zeros(2, 3, dtype=torch.long),), kwargs)
    return run.tree


def units(model, num_stages, opaque=(), descend=()):
    return choose_units(surveyed(model), set(opaque), num_stages, set(descend))


def test_repeated_blocks_are_units_whole():
    assert units(Model(), 2) == ["embed", *[f"layers.{i}" for i in range(4)], "head"]


def test_the_heaviest_is_looked_into_where_there_are_too_few():
    found = units(Model(num_layers=2), 6)
    assert len(found) >= 6
    assert {"layers.0.first", "layers.0.second"} & set(found)


def test_a_block_that_is_cut_inside_is_no_unit():
    found = units(Model(), 2, descend={"layers", "layers.1"})
    assert "layers.1.first" in found
    assert "layers.0" in found


def test_a_module_that_cannot_be_looked_into_is_a_unit_whatever_it_weighs():
    assert units(Model(num_layers=1), 5, opaque={"layers.0"}) == ["embed", "layers.0", "head"]


def test_a_module_with_hooks_is_a_unit_if_a_stage_can_hold_it():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Model(num_layers=6)

        def forward(self, ids):
            return self.small(self.large.embed(ids)).sum() + self.large(ids).sum()

    model = Outer()
    for module in (model.small, model.large):
        module.register_forward_hook(lambda *_: None)
    found = units(model, 4)
    assert "small" in found
    assert "large" not in found


def test_what_the_first_inputs_skipped_stands_next_to_what_comes_before_it():
    model = Model()
    tree = surveyed(model)
    assert skipped(tree, units(model, 2), [("scales", "0")]) == {"branch": "head"}
    assert skipped(surveyed(model, has_branch=True), [*units(model, 2), "branch"], []) == {}


def test_weights_are_shares_of_parameters_and_flops_evenly():
    assert Weights(100, 1000).of(50, 0) == 0.25
    assert Weights(100, 0).of(50, 0) == 0.5
    assert Weights(0, 0).of(0, 0) == 0.0


def test_a_shared_parameter_counts_once():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert count(model) == 4
