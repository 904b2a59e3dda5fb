import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import UnsupportedShape
from pipeloom.ir import Schedule
from pipeloom.ir.progress import buffers_needed
from pipeloom.ir.slots import peak_receive_bytes, peak_receive_slots
from pipeloom.ir.verify import verify
from pipeloom.passes import add_transfers, post_receives_early, without_transfers
from pipeloom.schedules import schedule as made
from tests.random_schedules import runnable_schedules
from tests.texts import schedule_of, text_of

GPIPE = "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"


def lowered(text: str) -> Schedule:
    return add_transfers(schedule_of(text, num_microbatches=3))


@pytest.mark.parametrize(
    ("num_slots", "expected"),
    [
        (1, "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2"),
        (2, "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2"),
        (9, "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2"),
    ],
)
def test_a_receive_is_posted_where_a_buffer_is_free(num_slots: int, expected: str) -> None:
    found = text_of(post_receives_early(lowered(GPIPE), num_slots))
    assert found[1] == f"{expected} 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"


def test_one_buffer_is_free_as_soon_as_its_message_is_used() -> None:
    """`add_transfers` posts it before its use, three forwards later."""
    found = text_of(post_receives_early(lowered(GPIPE), 1))
    assert found[0].startswith("0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0B0 0RECV_B1 0B1")


def test_a_rank_that_needs_more_buffers_stays_as_it_is() -> None:
    out_of_order = add_transfers(schedule_of("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1", num_microbatches=2))
    assert peak_receive_slots(out_of_order) == (1, 2)
    found = post_receives_early(out_of_order, 1)
    assert found.program(1) == out_of_order.program(1)
    assert peak_receive_slots(found) == (1, 2)


def test_bytes_are_those_of_the_boundaries() -> None:
    """GPipe on three ranks: the middle one receives over both boundaries."""
    found = post_receives_early(add_transfers(made("gpipe", num_ranks=3, num_microbatches=4)), 3)
    assert peak_receive_slots(found) == (3, 3, 3)
    assert peak_receive_bytes(found, (10, 1)) == (30, 30, 3)
    assert peak_receive_bytes(found, (1, 10)) == (3, 30, 30)


def test_without_transfers_there_is_nothing_to_post() -> None:
    schedule = made("zb-v", num_ranks=2, num_microbatches=4)
    assert post_receives_early(schedule, 3) == schedule


@pytest.mark.parametrize("num_slots", [0, -1, 1.5, "two", True])
def test_slots_are_counted(num_slots: object) -> None:
    with pytest.raises(UnsupportedShape, match="receive slots were given; a whole number of at least 1 is needed"):
        post_receives_early(lowered(GPIPE), num_slots)  # type: ignore[arg-type]


def positions(schedule: Schedule) -> dict[str, int]:
    """Per receive, how many computations and sends of its rank stand before it."""
    found = {}
    for program in schedule.programs:
        num_before = 0
        for action in program:
            if action.kind.is_recv:
                found[str(action)] = num_before
            else:
                num_before += 1
    return found


@settings(max_examples=150)
@given(runnable_schedules(has_links=True), st.integers(1, 5))
def test_more_buffers_never_post_later_and_nothing_else_changes(schedule: Schedule, num_slots: int) -> None:
    late = add_transfers(schedule)
    early, earlier = post_receives_early(late, num_slots), post_receives_early(late, num_slots + 1)
    assert (verify(early), buffers_needed(early)) == ([], 1)
    assert without_transfers(early) == schedule
    assert all(a <= max(num_slots, b) for a, b in zip(peak_receive_slots(early), peak_receive_slots(late), strict=True))
    before, then, after = positions(late), positions(early), positions(earlier)
    assert before.keys() == then.keys() == after.keys()
    assert all(after[receive] <= then[receive] <= before[receive] for receive in before)
