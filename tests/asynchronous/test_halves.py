"""Streams whose backwards come in two halves, by schedules of the user's own."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.testing import sequential_step
from tests.asynchronous import models
from tests.asynchronous.models import MODELS, OPTIMIZERS, batches, plain, seeded, square
from tests.numerics.asserts import assert_bit_equal, assert_same_state

WIDTH = 32


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Layers that are worth a W."""
    monkeypatch.setattr(models, "WIDTH", WIDTH)


def halved(num_ranks, num_microbatches, per_update, *, is_late):
    """PipeDream in two halves: each W right after its I; or all of a batch right before its U, the last one first."""
    made = pl.schedule(
        "pipedream", num_ranks=num_ranks, num_microbatches=num_microbatches, microbatches_per_update=per_update
    )
    programs = []
    for program in made.programs:
        found, late = [], []
        for action in program:
            if action.kind is pl.Kind.BACKWARD:
                found.append(replace(action, kind=pl.Kind.INPUT_GRAD))
                late.append(replace(action, kind=pl.Kind.WEIGHT_GRAD))
            if not is_late or action.kind is pl.Kind.UPDATE:
                found += reversed(late)
                late.clear()
            if action.kind is not pl.Kind.BACKWARD:
                found.append(action)
        programs.append(found)
    return made.with_programs(programs)


@pytest.mark.parametrize("recompute", [False, True, "*.inner"])
@pytest.mark.parametrize("kind", ["chain", "checkpointed", "skips"])
def test_gradients_add_up_in_the_order_of_w(kind, recompute):
    """Biases and scales, whose gradients I finds, added up in the order of the Is: they were looked for in the model's
    parameters, while a stream computes with leaves of each version.
    """
    if recompute == "*.inner" and kind != "checkpointed":
        pytest.skip("has no such modules")
    schedule = halved(2, 4, 4, is_late=True)
    model, reference, (given,) = seeded(MODELS[kind]), seeded(MODELS[kind]), batches(1, width=WIDTH)
    with pl.Pipeline(model, num_stages=2, schedule=schedule, loss_fn=square, recompute=recompute) as pipe:
        found = pipe.stream(OPTIMIZERS["sgd"]).train([given])
        options = {"num_microbatches": 4, "num_stages": 2, "schedule": schedule, "loss_fn": square}
        assert_bit_equal(found[0], sequential_step(reference, given[0], target=given[1], **options), "loss")
        OPTIMIZERS["sgd"](list(reference.parameters())).step()
        assert_same_state(pipe, reference)


@pytest.mark.in_one_process
def test_versions_that_nobody_uses_are_let_go():
    """A stage kept the weights of all updates until the stream ended, to know which of them had come in W."""
    shape, counts = (2 * WIDTH, WIDTH), []

    def counted(output, target):
        gc.collect()
        counts.append(sum(type(each) is nn.Parameter and each.shape == shape for each in gc.get_objects()))
        return square(output, target)

    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)), plain())
    schedule = halved(2, 12, 1, is_late=False)
    with pl.Pipeline(model, num_stages=2, schedule=schedule, loss_fn=counted) as pipe:
        pipe.stream(OPTIMIZERS["sgd"]).train(batches(12, width=WIDTH))
    assert max(counts) - counts[0] <= 2, counts
    assert torch.isfinite(model[0][0].weight).all()
