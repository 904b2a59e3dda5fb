"""Pairs that a rank runs as one, replicas on the same ranks, and actions on parameters."""

import pytest
from hypothesis import given

from pipeloom.cost import Costs
from pipeloom.errors import CostError, InvalidSchedule
from pipeloom.ir.notation import parse_csv
from pipeloom.ir.verify import Fault, verify
from pipeloom.passes import add_reductions, add_sharding, add_transfers
from pipeloom.report import draw
from pipeloom.sim import simulate
from tests.random_schedules import runnable_schedules

TWO_RANKS = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


def test_without_a_cost_of_its_own_a_pair_runs_one_after_the_other():
    apart = TWO_RANKS.replace("(0F2;0B0)OVERLAP_F_B", "0F2,0B0")
    assert simulate(parse_csv(TWO_RANKS), Costs.unit(2)).ends == simulate(parse_csv(apart), Costs.unit(2)).ends


@pytest.mark.parametrize("is_lowered", [False, True])
def test_a_pair_starts_when_both_can_and_ends_together(is_lowered):
    schedule = parse_csv(TWO_RANKS)
    schedule = add_transfers(schedule) if is_lowered else schedule
    costs = Costs.uniform(2, forward_s=1, input_grad_s=1, weight_grad_s=1, overlap_s=2.5)
    spans = {str(span.action): (span.start_s, span.end_s) for span in simulate(schedule, costs)}
    # 1B0 ends at 4; 0F2 could have started at 2.
    assert spans["0F2"] == spans["0B0"] == (4.0, 6.5)
    assert spans["1F2"] == (7.0, 8.0)  # when 1B1 has ended
    assert spans["0B1"] == (7.0, 9.0)


def test_what_a_pair_shares_counts_once():
    """Both halves were counted as busy for the whole pair, so ranks seemed to idle less than nothing."""
    costs = Costs.uniform(2, forward_s=1, input_grad_s=1, weight_grad_s=1, overlap_s=2.5)
    timeline = simulate(parse_csv(TWO_RANKS), costs)
    assert timeline.busy_s == (2 + 2.5 + 2 + 2, 9.0)
    assert timeline.bubble_fraction == 1 - 17.5 / (2 * timeline.makespan_s)
    ladder = draw(timeline, 0.5).splitlines()
    assert "F2----- B0----  . " in ladder[0]
    assert len(ladder[0]) == len("GPU 0: ") + round(3 * timeline.makespan_s / 0.5) - 1


def test_what_the_second_of_a_pair_waits_for_is_named():
    schedule = parse_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n")
    assert verify(schedule) == []
    costs = Costs.uniform(2, forward_s=1, input_grad_s=1, weight_grad_s=1, overlap_s=2.5)
    with pytest.raises(InvalidSchedule, match="rank 0 stands at 0B0 and waits for 1B0; rank 1 stands at 1F2 and waits"):
        simulate(schedule, costs)
    with pytest.raises(CostError, match="overlap_s has 1 values for 2 stages"):
        Costs.uniform(2, forward_s=1, input_grad_s=1, weight_grad_s=1, overlap_s=[2.5])


def test_two_replicas_meet_on_their_ranks():
    schedule = parse_csv("0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1\n")
    for made in (schedule, add_transfers(schedule)):
        assert verify(made) == []
        timeline = simulate(made, Costs.unit(2))
        assert timeline.makespan_s == 6
        assert timeline.bubble_fraction == 0
    assert add_transfers(schedule).program(0) == parse_csv(
        "0F0,0SEND_F0,1RECV_F1,1F1,1B1,1SEND_B1,0RECV_B0,0B0\n0F1,0SEND_F1,1RECV_F0,1F0,1B0,1SEND_B0,0RECV_B1,0B1\n"
    ).program(0)


@given(runnable_schedules())
def test_actions_on_parameters_take_no_time(schedule):
    costs = Costs.unit(schedule.num_stages)
    expected = simulate(schedule, costs)
    found = simulate(add_reductions(add_sharding(schedule)), costs)
    assert found.makespan_s == expected.makespan_s
    assert found.busy_s == expected.busy_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F1,(0B0;0SEND_B0)OVERLAP_F_B,0B1\n", "computations overlap"),
        ("(0F0;0B0)OVERLAP_F_B,0F1,0B1\n", "0B0 needs 0F0, so that they cannot overlap"),
    ],
)
def test_pairs_that_cannot_overlap_are_found(text, message):
    found = verify(parse_csv(text))
    assert any(each.fault is Fault.OVERLAP and message in each.message for each in found)
