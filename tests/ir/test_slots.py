import pytest
from hypothesis import given, settings

from pipeloom.ir import Schedule
from pipeloom.ir.notation import parse_action
from pipeloom.ir.slots import peak_receive_slots, receives_used_by
from pipeloom.passes import add_recompute, add_transfers
from pipeloom.schedules import schedule as made
from tests.random_schedules import runnable_schedules, shapes
from tests.texts import interleaved, schedule_of, zb_h1

TWO_AHEAD = """
0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2
1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2
"""


def test_slot_is_taken_from_post_to_consumer() -> None:
    schedule = schedule_of(TWO_AHEAD, num_microbatches=3, is_forward_only=True)
    assert peak_receive_slots(schedule) == (0, 2)


def test_consumer_names_its_receives() -> None:
    schedule = add_transfers(zb_h1())
    used = {text: [*map(str, receives_used_by(parse_action(text), schedule))] for text in ("1F3", "1I3", "1W3", "0F3")}
    assert used == {"1F3": ["1RECV_F3"], "1I3": ["1RECV_B3"], "1W3": [], "0F3": []}


def test_receive_that_nothing_consumes_keeps_its_slot() -> None:
    schedule = schedule_of("0F0\n1RECV_F0 1RECV_F1 1RECV_F2", num_microbatches=3)
    assert peak_receive_slots(schedule) == (0, 3)


@settings(max_examples=30)
@given(**shapes)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_slot_on_each_rank(name: str, num_ranks: int, num_microbatches: int) -> None:
    """torch keeps one per micro-batch and direction."""
    lowered = add_transfers(made(name, num_ranks=num_ranks, num_microbatches=num_microbatches))
    assert peak_receive_slots(lowered) == ((1,) * num_ranks if num_ranks > 1 else (0,))


@settings(max_examples=30)
@given(**shapes)
def test_first_rank_receives_nothing_in_evaluation(num_ranks: int, num_microbatches: int) -> None:
    forward = made("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches, forward_only=True)
    assert peak_receive_slots(add_transfers(forward)) == (0,) + (1,) * (num_ranks - 1)


@pytest.mark.parametrize("schedule", [zb_h1(), interleaved()])
def test_recomputation_needs_no_slot(schedule: Schedule) -> None:
    recomputed = add_recompute(schedule, range(schedule.num_stages))
    assert peak_receive_slots(add_transfers(recomputed)) == peak_receive_slots(add_transfers(schedule))


@given(runnable_schedules(has_links=True))
def test_every_slot_is_given_back(schedule: Schedule) -> None:
    lowered = add_transfers(schedule)
    for program in lowered.programs:
        posted = [action for action in program if action.kind.is_recv]
        used = [receive for action in program for receive in receives_used_by(action, lowered)]
        assert sorted(map(str, posted)) == sorted(map(str, used))
