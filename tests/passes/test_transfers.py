import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pipeloom.ir import Kind, Links, Schedule
from pipeloom.ir.notation import format_csv, parse_csv
from pipeloom.ir.peaks import peak_held_to_input_grad, peak_held_to_weight_grad
from pipeloom.ir.progress import buffers_needed
from pipeloom.ir.slots import peak_receive_slots
from pipeloom.ir.verify import verify
from pipeloom.passes import add_transfers
from pipeloom.schedules import schedule as made
from tests.random_schedules import links_of, runnable_schedules, shapes
from tests.rules import due_transfers, has_matching_transfers
from tests.texts import interleaved, schedule_of, text_of, zb_h1

GPIPE_LEFT_1F1B_RIGHT = """
0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
"""
BOTH_SEND_FIRST = """
0F0 2F0 0F1 2B0 2F1 0B0 2B1 0B1
1F0 3F0 3B0 1F1 1B0 3F1 3B1 1B1
"""


def lowered(text: str, **options: object) -> list[str]:
    return text_of(add_transfers(schedule_of(text, **options)))  # type: ignore[arg-type]


def computations(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in program if action.kind.is_compute] for program in schedule.programs]


def test_sends_follow_and_receives_precede() -> None:
    assert lowered("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", num_microbatches=2) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_middle_rank_passes_on_both_ways() -> None:
    assert lowered("0F0 0B0\n1F0 1B0\n2F0 2B0")[1] == "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0"


def test_evaluation_sends_forward_only() -> None:
    assert lowered("0F0\n1F0", is_forward_only=True) == ["0F0 0SEND_F0", "1RECV_F0 1F0"]


def test_input_gradient_is_sent_before_its_weight_gradient() -> None:
    assert lowered("0F0 0I0 0W0\n1F0 1I0 1W0")[1] == "1RECV_F0 1F0 1I0 1SEND_B0 1W0"


def test_recomputation_waits_for_no_transfer() -> None:
    assert lowered("0F0 0R0 0B0\n1F0 1R0 1B0") == [
        "0F0 0SEND_F0 0R0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1R0 1B0 1SEND_B0",
    ]


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 1, 0)])
def test_stages_of_one_rank_hand_over_without_a_transfer(ranks: tuple[int, ...]) -> None:
    text = {(0, 0): "0F0 1F0 1B0 0B0", (0, 1, 1, 0): "0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"}[ranks]
    schedule = add_transfers(schedule_of(text, ranks=ranks))
    stages = {action.stage for action in schedule if action.kind is Kind.SEND_F}
    assert stages == {stage for stage in range(len(ranks) - 1) if ranks[stage] != ranks[stage + 1]}
    assert verify(schedule) == []


def test_receives_of_a_channel_are_posted_in_the_order_of_the_sends() -> None:
    text = "0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1"
    assert lowered(text, num_microbatches=2)[1].startswith("1RECV_F0 1RECV_F1 1F1 1F0")


def test_lowered_schedule_is_returned_as_it_is() -> None:
    schedule = add_transfers(zb_h1())
    assert add_transfers(schedule) is schedule


def test_nothing_to_transfer_changes_nothing() -> None:
    schedule = made("1f1b", num_ranks=1, num_microbatches=3)
    assert add_transfers(schedule) == schedule


# Receives that must be posted ahead of their consumer


@pytest.mark.parametrize(
    ("schedule", "slots"),
    [
        (schedule_of(GPIPE_LEFT_1F1B_RIGHT, num_microbatches=4), (1, 1)),
        (schedule_of(BOTH_SEND_FIRST, ranks=(0, 1, 0, 1), num_microbatches=2), (1, 1)),
        (interleaved(), (1, 1)),
    ],
)
def test_one_buffer_is_enough_where_both_ranks_send_first(schedule: Schedule, slots: tuple[int, ...]) -> None:
    """With every receive right before its consumer these need two buffers or more."""
    found = add_transfers(schedule)
    assert verify(found) == []
    assert (buffers_needed(found), peak_receive_slots(found)) == (1, slots)


def test_only_the_receive_that_is_waited_for_is_posted_ahead() -> None:
    assert lowered(GPIPE_LEFT_1F1B_RIGHT, num_microbatches=4) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2 1RECV_F3 1F3 1B3 1SEND_B3",
    ]


def test_schedule_that_cannot_run_is_lowered_and_reported() -> None:
    schedule = add_transfers(schedule_of("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", num_microbatches=2))
    assert has_matching_transfers(schedule)
    assert "no number of buffers helps" in verify(schedule)[0].message


# Properties


@settings(max_examples=25)
@given(**shapes)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_generated_schedules_get_two_ends_a_value(name: str, num_ranks: int, num_microbatches: int) -> None:
    schedule = made(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    found = add_transfers(schedule)
    assert len(found) - len(schedule) == 4 * (num_ranks - 1) * num_microbatches
    assert computations(found) == computations(schedule)


@settings(max_examples=50)
@given(st.data(), st.integers(3, 8), st.integers(1, 8), st.booleans())
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_generated_schedules_with_links_end_with_one_buffer(
    name: str, data: st.DataObject, num_ranks: int, num_microbatches: int, forward_only: bool
) -> None:
    schedule = made(name, num_ranks=num_ranks, num_microbatches=num_microbatches, forward_only=forward_only)
    schedule = schedule.with_links(data.draw(links_of(num_ranks)))
    found = add_transfers(schedule)
    skips = len(schedule.links.forward) + (0 if forward_only else len(schedule.links.backward))
    chain = (num_ranks - 1) * (1 if forward_only else 2)
    assert (verify(found), buffers_needed(found)) == ([], 1)
    assert len(found) - len(schedule) == 2 * (chain + skips) * num_microbatches


@settings(max_examples=50)
@given(runnable_schedules(has_links=True), st.data())
def test_lost_skip_is_found(schedule: Schedule, data: st.DataObject) -> None:
    found = add_transfers(schedule)
    skips = sorted((action for action in found if action.peer is not None), key=str)
    assume(skips)
    lost = data.draw(st.sampled_from(skips))
    broken = found.with_programs([action for action in program if action != lost] for program in found.programs)
    assert verify(broken)


def test_sends_to_the_nearest_stage_come_first() -> None:
    links = Links(forward=((0, 3), (0, 2)), backward=((3, 0), (3, 1)))
    found = text_of(add_transfers(made("gpipe", num_ranks=4, num_microbatches=1).with_links(links)))
    assert found[0] == "0F0 0SEND_F0 0SEND_F0>2 0SEND_F0>3 0RECV_B0 0RECV_B0<3 0B0"
    assert found[3].endswith("3F0 3B0 3SEND_B0 3SEND_B0>1 3SEND_B0>0")


@settings(max_examples=200)
@given(runnable_schedules(has_links=True))
@example(interleaved())
@example(zb_h1())
def test_whatever_runs_without_transfers_runs_with_them(schedule: Schedule) -> None:
    found = add_transfers(schedule)
    assert verify(found) == []
    assert computations(found) == computations(schedule)


@given(runnable_schedules(has_links=True))
def test_every_value_that_changes_its_rank_is_transferred(schedule: Schedule) -> None:
    transfers = {action for action in add_transfers(schedule) if not action.kind.is_compute}
    assert transfers == set(due_transfers(schedule))


@given(runnable_schedules(has_links=True))
def test_transfers_change_no_peak(schedule: Schedule) -> None:
    found = add_transfers(schedule)
    assert peak_held_to_input_grad(found) == peak_held_to_input_grad(schedule)
    assert peak_held_to_weight_grad(found) == peak_held_to_weight_grad(schedule)


@given(runnable_schedules(has_links=True))
def test_lowering_is_done_once(schedule: Schedule) -> None:
    found = add_transfers(schedule)
    assert add_transfers(found) == found


@pytest.mark.parametrize("schedule", [zb_h1(), interleaved()])
def test_lowered_schedules_survive_the_csv(schedule: Schedule) -> None:
    found = add_transfers(schedule)
    assert parse_csv(format_csv(found)) == found
