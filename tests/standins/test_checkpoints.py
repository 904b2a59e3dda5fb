"""Checkpoints in a parent's code."""

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from pipeloom.standins.checkpoints import Buffers, checkpointed, stand_in
from pipeloom.standins.glue import Seen


@pytest.fixture(autouse=True)
def stand_ins():
    stand_in()


def counting():
    module, calls = nn.Linear(2, 2), []
    module.register_forward_pre_hook(lambda *_: calls.append(1))  # a second forward stops early
    return module, calls


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_outside_of_parents_code_is_torchs(is_reentrant):
    module, calls = counting()
    x = torch.ones(1, 2, requires_grad=True)
    torch_checkpoint.checkpoint(module, x, use_reentrant=is_reentrant).sum().backward()
    assert len(calls) == 2
    assert x.grad is not None


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_in_parents_code_calls_what_it_is_given_and_says_so(is_reentrant):
    module, calls = counting()
    x, mode = torch.ones(1, 2, requires_grad=True), Seen(lambda func, args, kwargs: func(*args, **kwargs))
    inside = []

    def run(y):
        inside.append(len(mode.checkpoints))
        return module(y)

    with mode:
        out = torch_checkpoint.checkpoint(run, x, use_reentrant=is_reentrant)
    out.sum().backward()
    assert (inside, len(mode.checkpoints), len(calls)) == ([1], 0, 1)


def test_a_unit_within_has_a_checkpoint_of_its_own():
    module, calls = counting()
    mode = Seen(lambda func, args, kwargs: func(*args, **kwargs))
    mode.checkpoints.append((True, torch_checkpoint.noop_context_fn))
    checkpointed(mode, module)(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 2
    with torch.no_grad():
        assert checkpointed(mode, module) is module


def test_the_second_forward_of_a_unit_updates_no_statistics():
    module = nn.BatchNorm1d(2)
    mode = Seen(lambda func, args, kwargs: func(*args, **kwargs))
    mode.checkpoints.append((True, torch_checkpoint.noop_context_fn))
    checkpointed(mode, module)(torch.randn(4, 2)).sum().backward()
    assert module.num_batches_tracked == 1


def test_the_second_forward_reads_what_the_first_one_read():
    module = nn.BatchNorm1d(2)
    buffers = Buffers(module)
    with buffers.noted():
        module(torch.randn(4, 2))
    module.running_mean.fill_(7.0)
    with buffers.put_back():
        assert module.running_mean.eq(0).all()
    assert module.running_mean.eq(7).all()
