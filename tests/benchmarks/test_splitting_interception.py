"""Nothing is intercepted inside units, and what their stand-ins are given reaches them."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import pipeloom as pl
from pipeloom.splitting.cut import Cut
from pipeloom.standins.glue import Seen, unseen
from pipeloom.standins.placeholder import Placeholder


class Looking(nn.Module):
    """A unit that notes which modes it runs under, where it runs for real."""

    def __init__(self, chance=0.0):
        super().__init__()
        self.inner, self.dropout = nn.Linear(4, 4), nn.Dropout(chance)
        self.seen = []

    def forward(self, x):
        if not isinstance(x, Placeholder):
            self.seen.append([*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()])
        return self.dropout(self.inner(x))


class Model(nn.Module):
    """Glue around units: residuals, and a mask that the way depends on."""

    def __init__(self, chance=0.0):
        super().__init__()
        self.layers = nn.ModuleList(Looking(chance) for _ in range(3))

    def forward(self, x, mask=None):
        for layer in self.layers:
            out = layer(x)
            x = x + (out if mask is None or mask.all() else out * mask)
        return x.sum()


@pytest.mark.parametrize("chance", [0.0, 0.5])
@pytest.mark.parametrize("mask", [None, torch.tensor([[0.0], [1.0]])])
def test_no_unit_runs_under_interception(chance, mask):
    model = Model(chance)
    given = {} if mask is None else {"mask": mask}
    with pl.Pipeline(model, num_stages=3, num_microbatches=2) as pipe:
        for _ in range(2):
            pipe.step(torch.randn(2, 4), **given)
    assert [layer.seen for layer in model.layers] == [[[]] * 4] * 3


class Ours(TorchFunctionMode):
    """A mode of the user's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_stays_inside_units():
    model = Model()
    with pl.Pipeline(model, num_stages=3, num_microbatches=2) as pipe, Ours() as mode:
        pipe.step(torch.randn(2, 4))
    assert [layer.seen for layer in model.layers] == [[[mode]] * 2] * 3


@pytest.mark.parametrize("num_above", [0, 1, 2])
def test_only_one_mode_is_taken_off(num_above):
    seen, above = Seen(lambda func, args, kwargs: func(*args, **kwargs)), [Ours() for _ in range(num_above)]
    with seen:
        for mode in above:
            mode.__enter__()
        with unseen(seen):
            assert _get_current_function_mode_stack() == above
        assert _get_current_function_mode_stack() == [seen, *above]
        for mode in reversed(above):
            mode.__exit__(None, None, None)


KEYWORDS = []


class Recording(nn.Module):
    """A parent that hooks its units while it runs, as transformers does to record outputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.handles = []

    def forward(self, x):
        if not self.handles:
            self.handles += [each.register_forward_hook(self.note, with_kwargs=True) for each in self.layers]
        for layer in self.layers:
            x = layer(x)
        return x

    def note(self, module, args, kwargs, out):
        del self, module, args, out
        KEYWORDS.append(kwargs)


def run(cut, inputs):
    return cut.run_whole(cut.plan(inputs), inputs, lambda *_: torch.enable_grad())


def test_hooks_put_on_stand_ins_reach_their_units():
    model, inputs = Recording(), ((torch.randn(1, 4),), {})
    cut = Cut(model, inputs, num_stages=2, cuts=None)
    run(cut, inputs)
    for _ in range(2):
        KEYWORDS.clear()
        run(cut, inputs)
        assert KEYWORDS == [{}] * 3  # stage 0 sees its own layer return, stage 1 both
    assert [len(each._forward_hooks) for each in model.layers] == [0, 0]
    assert [len(each._forward_hooks_with_kwargs) for each in model.layers] == [0, 0]


def test_hooks_taken_off_stand_ins_leave_their_units():
    class Once(Recording):
        def forward(self, x):
            with self.layers[0].register_forward_hook(self.note, with_kwargs=True):
                return self.layers[1](self.layers[0](x))

    model, inputs = Once(), ((torch.randn(1, 4),), {})
    cut = Cut(model, inputs, num_stages=2, cuts=None)
    run(cut, inputs)
    assert not model.layers[0]._forward_hooks


def test_hooks_of_the_users_stay():
    model, inputs, seen = Recording(), ((torch.randn(1, 4),), {}), []
    model.layers[0].register_forward_hook(lambda *_: seen.append(0))
    cut = Cut(model, inputs, num_stages=2, cuts=None)
    model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    run(cut, inputs)
    assert seen == [0, 1]
    assert [len(each._forward_hooks) for each in model.layers] == [1, 1]
