"""Shallow clones of a module tree."""

import copy
import functools

import pytest
import torch
from torch import nn

from pipeloom.standins.clone import Clones, is_of_a_library


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.plain = [self.layers[0]]
        self.by_name = {"last": self.layers[1]}
        self.bound = self.layers[1].forward
        self.partial = functools.partial(self.layers[0].forward)
        self.scale = 2.0

    def forward(self, x):
        self.seen = x
        return self.layers[1](self.layers[0](x)) * self.scale


def cloned(model, answered=()):
    calls = []

    def answer(name, clone, run, args, kwargs):
        calls.append(name)
        return run(*args, **kwargs)

    return Clones(model, lambda name, _: name in answered, answer), calls


def test_a_clone_computes_with_the_very_weights_and_writes_attributes_of_its_own():
    model, x = Parent(), torch.ones(1, 2)
    clones, _ = cloned(model)
    assert torch.equal(clones.root(x), copy.deepcopy(model)(x))
    assert clones.root.layers[0].weight is model.layers[0].weight
    assert not hasattr(model, "seen")


def test_calls_of_answered_modules_are_answered_in_order():
    clones, calls = cloned(Parent(), {"layers.0", "layers.1"})
    clones.root(torch.ones(1, 2))
    assert calls == ["layers.0", "layers.1"]
    assert type(clones.root.layers[0]) is nn.Linear


@pytest.mark.parametrize(
    "held",
    [lambda m: m.plain[0], lambda m: m.partial.func.__self__, lambda m: m.layers[0]],
    ids=["list", "partial", "children"],
)
def test_references_to_modules_lead_to_clones(held):
    model = Parent()
    clones, _ = cloned(model)
    assert held(clones.root) is clones.of["layers.0"]
    assert clones.root.by_name["last"] is clones.root.bound.__self__ is clones.of["layers.1"]


def test_a_wrapper_around_a_forward_calls_the_clones_forward():
    model = Parent()
    inner = model.forward
    model.forward = lambda x: inner(x) * 3
    clones, calls = cloned(model, {"layers.0"})
    assert torch.equal(clones.root(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert calls == ["layers.0"]


def test_a_wrapper_keeps_what_it_counts_in_a_list():
    model, counted = Parent(), []
    inner = model.forward
    model.forward = lambda x: counted.append(1) or inner(x)
    clones, _ = cloned(model)
    clones.root(torch.ones(1, 2))
    assert counted == [1]


def test_a_module_with_a_call_of_its_own_is_answered_and_keeps_its_name():
    class Loud(nn.Linear):
        def __call__(self, *args):
            return super().__call__(*args) + 1

    model = nn.Sequential(Loud(2, 2))
    clones, calls = cloned(model, {"0"})
    assert torch.equal(clones.root(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert calls == ["0"]
    assert type(clones.of["0"]).__name__ == "Loud"
    assert isinstance(clones.of["0"], Loud)


def test_clones_follow_modes_and_plain_values():
    model = Parent()
    clones, _ = cloned(model)
    model.eval()
    model.scale = 5.0
    clones.follow()
    assert not clones.of["layers.0"].training
    assert clones.root.scale == 5.0


def test_a_module_with_two_names_has_one_clone():
    shared = nn.Linear(2, 2)
    clones, _ = cloned(nn.ModuleDict({"a": shared, "b": shared}))
    assert clones.root["a"] is clones.root["b"] is clones.of["a"]


def test_hooks_of_torch_make_up_a_module_and_those_of_others_do_not():
    normed = nn.utils.spectral_norm(nn.Linear(2, 2))
    hook = next(iter(normed._forward_pre_hooks.values()))
    assert is_of_a_library(hook)
    assert not is_of_a_library(test_clones_follow_modes_and_plain_values)
    assert "weight_u" in dict(normed.named_buffers())


def test_a_container_that_modules_share_is_one_for_their_clones_and_not_the_models():
    model, shared = Parent(), {"layers": []}
    model.shared = model.layers[0].shared = shared
    clones, _ = cloned(model)
    assert clones.root.shared is clones.of["layers.0"].shared
    assert clones.root.shared == shared
    assert clones.root.shared is not shared
