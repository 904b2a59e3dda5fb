"""Virtual devices: a measured timeline is a simulated one, action by action."""

import time

import pytest
import torch

import pipeloom as pl
from pipeloom.ir import Kind
from pipeloom.testing import virtual_costs, virtual_stages

TICK_S = 0.2
COMPUTE = (Kind.FORWARD, Kind.BACKWARD)


def _starts_and_ends(timeline):
    """In ticks from the first computation's start, per action."""
    spans = [span for span in timeline if span.action.kind in COMPUTE]
    zero = min(span.start_s for span in spans)
    return {span.action: ((span.start_s - zero) / TICK_S, (span.end_s - zero) / TICK_S) for span in spans}


def _late(measured, expected):
    """Per action how many ticks it was off, where that is more than a tenth."""
    off = {
        str(action): max(abs(found - due) for found, due in zip(measured[action], times, strict=True))
        for action, times in expected.items()
    }
    return {action: ticks for action, ticks in off.items() if ticks > 0.1}


def _best(runs):
    """Other load only delays, so an action's earliest times over a few steps are the pipeline's own."""
    return {action: tuple(min(run[action][end] for run in runs) for end in (0, 1)) for action in runs[0]}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_measured_and_simulated_agree_action_by_action(schedule):
    """Each start and end within a tenth of a tick; a machine that is busy gets more steps to show it."""
    costs = virtual_costs(4, TICK_S, 2 * TICK_S)
    expected = _starts_and_ends(pl.simulate(pl.schedule(schedule, num_ranks=4, num_microbatches=4), costs))
    runs, late = [], {"nothing ran": 0.0}
    with pl.Pipeline(
        virtual_stages(4, TICK_S, 2 * TICK_S),
        schedule=schedule,
        num_microbatches=4,
        loss_fn=lambda output: output.sum(),
    ) as pipe:
        while late and len(runs) < 40:
            pipe.step(torch.zeros(4, 1))
            runs.append(_starts_and_ends(pipe.timeline))
            late = _late(_best(runs), expected)
    assert runs[0].keys() == expected.keys()
    assert not late


def test_both_timelines_are_one_type():
    with pl.Pipeline(virtual_stages(2, 0, 0), num_microbatches=2, loss_fn=lambda output: output.sum()) as pipe:
        pipe.step(torch.zeros(2, 1))
        simulated = pl.simulate(pipe.schedule, virtual_costs(2))
        assert type(pipe.timeline) is type(simulated) is pl.Timeline
        assert pipe.timeline.schedule == simulated.schedule


def test_a_virtual_stage_returns_its_input_and_its_gradient():
    stage = virtual_stages(1, 0, 0)[0]
    value = torch.ones(2, 3, requires_grad=True)
    stage(value).backward(torch.full((2, 3), 7.0))
    assert torch.equal(value.grad, torch.full((2, 3), 7.0))
    assert torch.equal(stage.weight.grad, torch.zeros(()))


def test_virtual_costs_leave_the_backward_whole():
    costs = virtual_costs(3, 0.1, 0.3)
    assert costs.forward_s == (0.1,) * 3
    assert costs.input_grad_s == (0.3,) * 3
    assert costs.weight_grad_s == (0.0,) * 3


@pytest.mark.parametrize("needs_input_grad", [False, True])
def test_a_backward_waits_once_whoever_asks_for_its_gradient(needs_input_grad, monkeypatch):
    """The first stage of a model has no gradient to hand on, and takes its time all the same."""
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    stage = virtual_stages(1, 100.0, 500.0)[0]
    result = stage(torch.ones(2, requires_grad=needs_input_grad))
    assert waited == [pytest.approx(100, abs=50)]
    result.sum().backward()
    assert waited[1:] == [pytest.approx(500, abs=50)]


def test_a_virtual_weight_has_its_gradient_before_the_wait_is_over(monkeypatch):
    stage = virtual_stages(1, 0, 500.0)[0]
    grads = []
    monkeypatch.setattr(time, "sleep", lambda _: grads.append(stage.weight.grad))
    stage(torch.ones(2, requires_grad=True)).sum().backward()
    assert grads[0].tolist() == 0
