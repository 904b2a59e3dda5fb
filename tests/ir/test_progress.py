import pytest
from hypothesis import assume, given, settings

from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.progress import Run, buffers_needed, stuck_ranks
from pipeloom.ir.relations import counterpart
from pipeloom.passes import add_transfers
from tests.random_schedules import runnable_schedules
from tests.rules import can_end, channels
from tests.texts import interleaved, schedule_of, text_of, zb_h1

SENDS_BEFORE_IT_RECEIVES = """
0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3
1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1RECV_F3 1F3 1B3 1SEND_B3
"""
"""Rank 0 sends four activations before it posts a receive; rank 1 returns each gradient at once."""


def stuck_text(schedule: Schedule, buffers_per_channel: int = 1) -> list[str]:
    return [
        f"{each.rank}@{each.position} {each.action} waits for {each.waits_for}"
        for each in stuck_ranks(schedule, buffers_per_channel)
    ]


@pytest.mark.parametrize("schedule", [zb_h1(), interleaved(), schedule_of("0F0 0B0"), schedule_of("0F0\n1F0")])
def test_right_schedules_end(schedule: Schedule) -> None:
    assert stuck_ranks(schedule) == ()


def test_cycle_between_ranks_is_stuck_on_both() -> None:
    schedule = schedule_of("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", num_microbatches=2)
    assert stuck_text(schedule) == ["0@1 0B0 waits for 1B0", "1@0 1F1 waits for 0F1"]


def test_wait_along_a_chain_is_reported_for_every_rank() -> None:
    backwards = schedule_of("0B0 0F0\n1F0 1B0\n2F0 2B0")
    assert stuck_text(backwards) == ["0@0 0B0 waits for 0F0", "1@0 1F0 waits for 0F0", "2@0 2F0 waits for 1F0"]


def test_full_channel_is_a_wait_for_room() -> None:
    assert stuck_text(schedule_of(SENDS_BEFORE_IT_RECEIVES, num_microbatches=4)) == [
        "0@7 0SEND_F3 waits for None",
        "1@7 1SEND_B1 waits for None",
    ]


def test_one_more_buffer_lets_it_end() -> None:
    schedule = schedule_of(SENDS_BEFORE_IT_RECEIVES, num_microbatches=4)
    assert stuck_ranks(schedule, 2) == ()
    assert buffers_needed(schedule) == 2


def test_posted_receive_needs_no_buffer() -> None:
    schedule = schedule_of("0F0 0SEND_F0\n1RECV_F0 1F0", is_forward_only=True)
    assert stuck_ranks(schedule, 0) == ()


def test_missing_send_holds_its_consumer_up() -> None:
    schedule = schedule_of("0F0\n1RECV_F0 1F0", is_forward_only=True)
    assert stuck_text(schedule) == ["1@1 1F0 waits for 1RECV_F0"]


def test_no_buffers_help_a_cycle_of_needs() -> None:
    assert buffers_needed(schedule_of("0B0 0F0")) is None


@pytest.mark.parametrize("schedule", [zb_h1(), interleaved()])
def test_schedule_without_transfers_needs_the_least(schedule: Schedule) -> None:
    assert buffers_needed(schedule) == 1


def test_run_goes_on_after_a_receive_was_posted_earlier() -> None:
    run = Run(schedule_of(SENDS_BEFORE_IT_RECEIVES, num_microbatches=4), buffers_per_channel=1)
    assert [stuck.rank for stuck in run.to_the_end()] == [0, 1]
    receives, position = run.programs[0], run.positions[0]
    receives.insert(position, receives.pop(position + 1))
    assert run.to_the_end() == ()
    assert "0RECV_B0 0SEND_F3" in " ".join(map(str, receives))


@given(runnable_schedules(has_links=True))
def test_what_runs_in_some_order_ends(schedule: Schedule) -> None:
    assert stuck_ranks(schedule) == ()


@settings(max_examples=50)
@given(runnable_schedules(has_links=True))
def test_reversed_programs_end_only_if_nothing_is_needed(schedule: Schedule) -> None:
    backwards = schedule.with_programs(program[::-1] for program in schedule.programs)
    assert [stuck.rank for stuck in stuck_ranks(backwards)] == list(range(schedule.num_ranks))


def received_late(schedule: Schedule) -> Schedule:
    """Lowered in the naive way, every receive right before its consumer: it may need many buffers."""
    programs = []
    for program in add_transfers(schedule).programs:
        receives = [action for action in program if action.kind.is_recv]
        late: list[Action] = []
        for action in (action for action in program if not action.kind.is_recv):
            used = {Kind.FORWARD: Kind.RECV_F, Kind.BACKWARD: Kind.RECV_B, Kind.INPUT_GRAD: Kind.RECV_B}.get(
                action.kind
            )
            late += [each for each in receives if (each.kind, *_place(each)) == (used, *_place(action))]
            late.append(action)
        programs.append(late)
    return schedule.with_programs(programs)


def _place(action: Action) -> tuple[int, int]:
    return action.stage, action.microbatch


@given(runnable_schedules(has_links=True))
def test_a_run_ends_exactly_if_its_waits_have_no_cycle(schedule: Schedule) -> None:
    lowered = received_late(schedule)
    sends, receives = channels(lowered)
    assume(sends == receives)
    ends = [can_end(lowered, count) for count in (1, 2, 3)]
    assert [stuck_ranks(lowered, count) == () for count in (1, 2, 3)] == ends
    assert buffers_needed(lowered) == next((count for count in range(1, 50) if can_end(lowered, count)), None)


def test_text_of_the_example_is_what_was_written() -> None:
    schedule = schedule_of(SENDS_BEFORE_IT_RECEIVES, num_microbatches=4)
    assert text_of(schedule) == SENDS_BEFORE_IT_RECEIVES.strip().splitlines()
    assert all(counterpart(action) in schedule.actions for action in schedule if not action.kind.is_compute)
