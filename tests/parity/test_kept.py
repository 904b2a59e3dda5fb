"""A trial run leaves everything as it was."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from pipeloom.parity.kept import as_before
from tests.parity.models import Net, made


class Busy(nn.Module):
    """A forward that changes all there is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("cache", None)
        self.weight = nn.Parameter(torch.ones(3))
        self.count = 0

    def forward(self, value):
        self.total += 1
        self.cache = torch.ones(1)
        self.count += 1
        self.new = value
        self.weight.requires_grad_(False)
        self.eval()
        return value.add_(self.weight * random.random() * np.random.rand() * torch.rand(3))


def state(module):
    """All that can be seen of it."""
    return (module.total.tolist(), module.cache, module.count, hasattr(module, "new"), module.training,
            module.weight.requires_grad)  # fmt: skip


def test_all_of_a_module_is_put_back():
    module, value = Busy(), torch.zeros(3)
    before, total = state(module), module.total
    with as_before(module, (value,)):
        module(value)
        assert state(module) == ([1.0, 1.0, 1.0], torch.ones(1), 1, True, False, False)
    assert state(module) == before
    assert module.total is total
    assert value.tolist() == [0, 0, 0]


def test_random_states_are_put_back():
    module = Busy()
    expected = [random.random(), np.random.rand(), float(torch.rand(()))]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    with as_before(module, ()):
        module(torch.zeros(3))
    drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    assert drawn == [random.random(), np.random.rand(), float(torch.rand(()))]
    assert drawn != expected


def test_it_is_put_back_after_a_failure_too():
    model = made(Net)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch"), as_before(model, ()):
        model(torch.randn(4, 8)) @ torch.ones(1)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert model.last_rows == 0


def test_what_did_not_change_is_not_written():
    module = nn.BatchNorm1d(3).eval()
    version = module.running_mean._version
    with as_before(module, (torch.ones(2, 3),)):
        module(torch.ones(2, 3))
    assert module.running_mean._version == version
    assert not module.training
