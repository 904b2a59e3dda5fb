"""What is held: as many versions of each stage's weights as the schedule says, in memory too."""

import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pipeloom as pl
from pipeloom.asynchronous import versions
from pipeloom.asynchronous.versions import StageWeights
from pipeloom.ir.versions import peak_versions_held, used_versions
from tests.asynchronous.models import RULES, square

SIZES = (5, 6, 7, 8, 9)


@pytest.mark.parametrize("name", RULES)
def test_memory_holds_as_many_versions_as_the_schedule_says(name, monkeypatch):
    """Leaves that are alive, and the weights themselves, by the memory that they are on, before each update."""
    leaves, held, made = [], dict.fromkeys(range(4), 0), versions._leaf

    def noted(weight):
        leaf = made(weight)
        leaves.append((weakref.ref(leaf), leaf.shape))
        return leaf

    def counting(weights):
        (weight,) = weights
        optimizer, stage = torch.optim.SGD(weights, lr=0.1), SIZES.index(weight.shape[1])

        def count(*_):
            alive = [ref() for ref, shape in leaves if shape == weight.shape]
            memory = {each.data_ptr() for each in (weight, *alive) if each is not None}
            held[stage] = max(held[stage], len(memory))

        optimizer.register_step_pre_hook(count)
        return optimizer

    monkeypatch.setattr(versions, "_leaf", noted)
    model = nn.Sequential(*[nn.Linear(one, other, bias=False) for one, other in pairwise(SIZES)])
    given = [(torch.randn(8, SIZES[0]), torch.randn(8, SIZES[-1])) for _ in range(9)]
    parts = 4 if name == "pipedream-2bw" else 1
    with pl.Pipeline(model, num_stages=4, schedule=name, num_microbatches=parts, loss_fn=square) as pipe:
        pipe.stream(counting).train(given)
        peaks = pipe.timeline.peak_versions_held
    assert tuple(held.values()) == peaks
    assert peaks == {"pipedream": (4, 3, 2, 1), "pipedream-vertical-sync": (4,) * 4, "pipedream-2bw": (2,) * 4}[name]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(RULES)), st.integers(1, 6), st.integers(1, 30))
def test_a_stage_holds_what_is_counted(name, num_ranks, num_microbatches):
    """The programs of all ranks, walked without running anything."""
    made = pl.schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    used = used_versions(made)
    for rank, peak in enumerate(peak_versions_held(made)):
        held = StageWeights([nn.Linear(1, 1)], [used[rank, i] for i in range(num_microbatches)], lambda: None)
        for action in made.program(rank):
            if action.kind is pl.Kind.UPDATE:
                held.update()
                continue
            is_backward = action.kind is pl.Kind.BACKWARD
            with held.used_by(action.microbatch, is_backward=is_backward):
                pass
            if is_backward:
                held.is_done(action.microbatch)
        assert held.peak_held == peak


def test_a_stage_whose_backward_follows_its_forward_copies_nothing():
    layer = nn.Linear(2, 2)
    memory = [each.data_ptr() for each in layer.parameters()]
    held = StageWeights([layer], [0, 1, 2], lambda: None)
    for microbatch in range(3):
        with held.used_by(microbatch, is_backward=False):
            assert [each.data_ptr() for each in layer.parameters()] == memory
        with held.used_by(microbatch, is_backward=True):
            pass
        held.is_done(microbatch)
        held.update()
    assert [each.data_ptr() for each in layer.parameters()] == memory
