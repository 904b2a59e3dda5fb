"""Which models can be cut where, and what is said about those that cannot."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeloom.errors import SplitError
from pipeloom.splitting import split


def sizes(made):
    return [len(units) for units in made.stages]


def layers(count):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def test_cuts_start_new_stages():
    made = split(layers(9), cuts=[2, 5, 7])
    assert sizes(made) == [2, 3, 2, 2]
    assert [unit.name for unit in made.stages[1]] == ["2", "3", "4"]


def test_layers_without_parameters_are_spread_evenly():
    assert sizes(split(nn.Sequential(*(nn.Identity() for _ in range(6))), num_stages=3)) == [2, 2, 2]


@given(st.integers(1, 9), st.data())
def test_stages_hold_all_units_in_order(count, data):
    num_stages = data.draw(st.integers(1, count))
    made = split(layers(count), num_stages=num_stages)
    assert made.num_stages == num_stages
    assert [unit.name for unit in made.units] == [str(index) for index in range(count)]
    assert all(units for units in made.stages)


def test_parameters_decide_the_cut():
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert sizes(split(model, num_stages=2)) == [1, 3]


def test_cuts_and_stages_may_agree():
    assert sizes(split(layers(4), num_stages=2, cuts=[3])) == [3, 1]
    assert sizes(split(layers(4))) == [4]
    assert sizes(split(layers(4), cuts=[])) == [4]


@pytest.mark.parametrize("cut", [(1, 3), range(1, 3), torch.Size([2]), np.array([1, 3]), [np.int64(2)]])
def test_cuts_may_be_any_sequence(cut):
    assert split(layers(5), cuts=cut).num_stages == len(cut) + 1


@pytest.mark.parametrize("cuts", [[3, 2], [2, 2], [0], [5], [-1], [1, 9], [1.0], [True], ["1", 2], [None]])
def test_cuts_out_of_order_or_range(cuts):
    with pytest.raises(SplitError, match=r"cuts=\[.*\] were given; whole numbers are needed, ascending, from 1 to 4"):
        split(layers(5), cuts=cuts)


@pytest.mark.parametrize("cuts", [3, "25", int])
def test_cuts_that_are_no_sequence(cuts):
    with pytest.raises(SplitError, match=r"cuts=.* was given; a sequence of whole numbers is needed"):
        split(layers(5), cuts=cuts)


@pytest.mark.parametrize("num_stages", [0, -1, 1.5, True, "2"])
def test_number_of_stages_that_is_none(num_stages):
    with pytest.raises(SplitError, match=r"num_stages=.* was given; a whole number of at least 1 is needed"):
        split(layers(5), num_stages=num_stages)


def test_more_stages_than_layers():
    with pytest.raises(SplitError, match=r"6 stages were asked for, but the model has 5 layers.*\n.*at most 5 stages"):
        split(layers(5), num_stages=6)
    assert split(layers(5), num_stages=5).num_stages == 5


def test_cuts_and_stages_that_disagree():
    with pytest.raises(SplitError, match=r"cuts=\[2\] make 2 stages, but num_stages=3 was given too"):
        split(layers(5), num_stages=3, cuts=[2])


class Reversed(nn.Sequential):
    def forward(self, value):
        for layer in reversed(self):
            value = layer(value)
        return value


def patched():
    """As accelerate does: the instance has another forward than its class."""
    model = layers(3)
    model.forward = lambda value: value
    return model


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Reversed(*layers(3)), nn.Sequential(), patched()])
def test_models_that_are_no_chain(model):
    with pytest.raises(SplitError, match=r"a \w+ is cut by running it, and no inputs were given\nhint: pass example_"):
        split(model, num_stages=2)
    assert split(model, num_stages=1).units[0].module is model


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_on_the_whole_are_refused(hook):
    model = layers(3)
    getattr(model, hook)(lambda *_: None)
    with pytest.raises(SplitError, match=r"has hooks of its own; .*never run\nhint: register them on its children"):
        split(model, num_stages=2)


def test_subclass_that_only_adds_names_is_a_chain():
    class Named(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(2, 2), nn.Tanh())

    assert split(Named(), num_stages=2).num_stages == 2


def test_modules_of_a_list_are_stages():
    made = split([nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)])
    assert sizes(made) == [1, 1, 1]
    assert [name for name, _ in made.root.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert split(nn.ModuleList([nn.Linear(2, 2)])).num_stages == 1


@pytest.mark.parametrize("options", [{"cuts": [1]}, {"num_stages": 3}, {"num_stages": 2, "cuts": [1]}])
def test_lists_are_cut_already(options):
    with pytest.raises(SplitError, match=r"a list of 2 stage modules was given with .*\nhint: pass nn.Sequential\("):
        split([nn.Linear(2, 2), nn.Linear(2, 2)], **options)


@pytest.mark.parametrize("model", [[], [nn.Tanh(), "relu"], [nn.Linear], None, 3, lambda x: x, nn.Linear])
def test_what_is_no_model(model):
    with pytest.raises(SplitError, match=r"was given; (one nn.Module per stage is needed|an nn.Sequential or a list)"):
        split(model)


def test_shared_modules_and_buffers_are_named():
    norm = nn.BatchNorm1d(2, affine=False)
    other = nn.BatchNorm1d(2, affine=False)
    other.running_mean = norm.running_mean
    with pytest.raises(SplitError, match=r"'2' of stage 1 is the same module as '0' of stage 0;.*\n.*cuts"):
        split(nn.Sequential(norm, nn.Tanh(), norm), cuts=[2])
    with pytest.raises(SplitError, match=r"'1.running_mean' of stage 1 is the same buffer as '0.running_mean'"):
        split(nn.Sequential(norm, other), cuts=[1])
    assert split(nn.Sequential(norm, nn.Tanh(), norm), cuts=[]).num_stages == 1


def test_same_module_twice_in_one_stage():
    shared = nn.Linear(2, 2)
    made = split(nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(2, 2)), cuts=[3])
    assert [unit.name for unit in made.stages[0]] == ["0", "1", "2"]
    assert made.stages[0][0].module is made.stages[0][2].module


def test_module_without_state_may_stand_in_two_stages():
    activation = nn.ReLU()
    assert split(nn.Sequential(nn.Linear(2, 2), activation, nn.Linear(2, 2), activation), cuts=[2]).num_stages == 2


def test_lazy_layers_have_no_weight_to_balance():
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyLinear(2))
    with pytest.raises(SplitError, match=r"the model holds a lazy LazyLinear[^$]*hint: call the model once before"):
        split(model, num_stages=2)
    assert sizes(split(model, cuts=[1])) == [1, 1]
