import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cost import Costs
from pipeloom.errors import InvalidSchedule
from pipeloom.ir import Schedule
from pipeloom.ir.notation import parse_csv
from pipeloom.ir.verify import Fault, verify
from pipeloom.passes import add_recompute, add_transfers, close_pairs, post_receives_early, without_transfers
from pipeloom.schedules import schedule as made
from pipeloom.sim import simulate
from tests.random_schedules import runnable_schedules
from tests.texts import text_of


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    return made("dualpipe-v", num_ranks=num_ranks, num_microbatches=num_microbatches)


def test_transfers_between_the_two_stand_around_them() -> None:
    lowered = add_transfers(parse_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"))
    assert "0F2 0SEND_F2 0RECV_B0 0B0" in text_of(lowered)[0]
    assert "0RECV_B0 0F2 0B0 0SEND_F2 0RECV_B1 0B1" in text_of(close_pairs(lowered))[0]


def test_a_schedule_that_counts_on_one_after_the_other_is_found() -> None:
    """1F2 stands before 1B0: rank 0 would wait for the gradient of a value that it has not sent."""
    schedule = add_transfers(parse_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"))
    assert verify(schedule) == []
    assert {each.fault for each in verify(close_pairs(schedule))} == {Fault.DEADLOCK}
    costs = Costs.uniform(2, forward_s=1, input_grad_s=1, weight_grad_s=1, overlap_s=2.5)
    with pytest.raises(InvalidSchedule):  # the simulator says the same of the schedule as it is
        simulate(schedule, costs)


@given(st.integers(1, 6), st.integers(0, 6), st.booleans(), st.none() | st.integers(1, 4))
def test_dualpipe_v_runs_with_closed_pairs(num_ranks: int, more: int, has_recompute: bool, slots: int | None) -> None:
    schedule = dualpipe_v(num_ranks, 2 * num_ranks + more)
    schedule = add_recompute(schedule, range(0, schedule.num_stages, 2)) if has_recompute else schedule
    found = close_pairs(add_transfers(schedule))
    found = found if slots is None else post_receives_early(found, slots)
    assert verify(found) == []
    assert without_transfers(found) == schedule
    assert close_pairs(found) == found
    for first, second in found.overlaps:
        program = found.program(found.rank_of(first.stage))
        assert program.index(second) == program.index(first) + 1


@given(runnable_schedules(has_links=True))
def test_without_pairs_nothing_changes(schedule: Schedule) -> None:
    lowered = add_transfers(schedule)
    assert close_pairs(lowered) == lowered
