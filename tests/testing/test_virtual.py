"""Virtual devices: a measured timeline is a simulated one, action by action."""

import time
from itertools import pairwise

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import pipeloom as pl
from pipeloom.errors import CostError
from pipeloom.halves import Halves
from pipeloom.passes import add_recompute
from pipeloom.testing import virtual_costs, virtual_stages

TICK_S = 0.2


def _starts_and_ends(timeline):
    """In ticks from the first computation's start, per action."""
    spans = [span for span in timeline if span.action.kind.is_compute]
    zero = min(span.start_s for span in spans)
    return {span.action: ((span.start_s - zero) / TICK_S, (span.end_s - zero) / TICK_S) for span in spans}


def _late(measured, expected):
    """Per action how many ticks it was off, where that is more than a tenth and a hundredth of the time until then:
    what each action before it took beyond its wait adds up, and is more where coverage looks on.
    """
    off = {
        str(action): max(abs(found - due) - due / 100 for found, due in zip(measured[action], times, strict=True))
        for action, times in expected.items()
    }
    return {action: ticks for action, ticks in off.items() if ticks > 0.1}


def _best(runs):
    """Other load only delays, so an action's earliest times over a few steps are the pipeline's own."""
    return {action: tuple(min(run[action][end] for run in runs) for end in (0, 1)) for action in runs[0]}


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("gpipe", False), ("1f1b", False), ("zb-h1", False), ("zb-h1", True)]
)
def test_measured_and_simulated_agree_action_by_action(schedule, recompute):
    """Each start and end, about a tenth of a tick; a machine that is busy gets more steps to show it."""
    times_s = (TICK_S, 2 * TICK_S, TICK_S)
    made = pl.schedule(schedule, num_ranks=4, num_microbatches=4)
    planned = add_recompute(made, range(4)) if recompute else made
    expected = _starts_and_ends(pl.simulate(planned, virtual_costs(4, *times_s)))
    runs, late = [], {"nothing ran": 0.0}
    with pl.Pipeline(
        virtual_stages(4, *times_s),
        recompute=recompute,
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


def test_virtual_costs_are_those_of_the_stages():
    costs = virtual_costs(2, 0.1, 0.3, 0.125)
    assert (costs.forward_s, costs.input_grad_s, costs.weight_grad_s) == ((0.1,) * 2, (0.175,) * 2, (0.125,) * 2)


@pytest.mark.parametrize("make", [virtual_costs, virtual_stages])
@pytest.mark.parametrize("weight_grad_s", [0.4, -0.1])
def test_a_weights_share_is_a_part_of_the_backward(make, weight_grad_s):
    with pytest.raises(CostError, match=r"weight_grad_s=.* was given with backward_s=0\.3; .*\nhint: give the seconds"):
        make(2, 0.1, 0.3, weight_grad_s)


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


@pytest.fixture
def waited(monkeypatch):
    """Instead of sleeping, the clock is put forward; what was slept stands in the list."""
    waits, real = [], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + sum(waits))
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def _whole(stage, value):
    stage(value).sum().backward()
    return ()


def _in_halves(stage, value):
    halves = Halves()
    with halves.forward():
        output = stage(value).sum()
    with halves.input_gradients():
        output.backward()
    yield
    halves.weight_gradients()


def _in_torchs_halves(stage, value):
    loss = stage(value).sum()
    _, groups = stage_backward_input([loss], None, [value], iter([stage.weight]))
    yield
    stage_backward_weight(iter([stage.weight]), groups)


@pytest.mark.parametrize(
    ("way", "needs_input_grad", "backward"),
    [
        (_whole, True, [700]),
        (_whole, False, [700]),
        (_in_halves, True, [500, 200]),
        (_in_halves, False, [500, 200]),
        (_in_torchs_halves, True, [500, 200]),
    ],
)
def test_halves_take_their_times_whoever_runs_them(way, needs_input_grad, backward, waited):
    stage = virtual_stages(1, 100.0, 700.0, 200.0)[0]
    value = torch.ones(2, requires_grad=needs_input_grad)
    ends = []
    for _ in way(stage, value):
        ends.append(sum(waited))
        assert stage.weight.grad is None
    ends.append(sum(waited))
    begins = [waited[0], *ends]
    assert [end - begin for begin, end in pairwise(begins)] == [pytest.approx(each, abs=50) for each in backward]
    assert stage.weight.grad.tolist() == 0
    assert not needs_input_grad or value.grad.tolist() == [1, 1]


def test_a_virtual_weight_has_its_gradient_before_the_wait_is_over(monkeypatch):
    stage = virtual_stages(1, 0, 500.0)[0]
    grads = []
    monkeypatch.setattr(time, "sleep", lambda _: grads.append(stage.weight.grad))
    stage(torch.ones(2, requires_grad=True)).sum().backward()
    assert grads[0].tolist() == 0
