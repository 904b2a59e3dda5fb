"""Each fault by itself: what is reported, where, and in which words."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings

from pipeloom.errors import CostError, InvalidSchedule
from pipeloom.ir import Schedule
from pipeloom.ir.notation import parse_csv
from pipeloom.ir.peaks import peak_held_to_input_grad, peak_held_to_weight_grad
from pipeloom.ir.progress import buffers_needed
from pipeloom.ir.verify import Fault, Limits, Violation, require_valid, verify
from pipeloom.passes import add_recompute, add_transfers
from pipeloom.schedules import schedule as made
from tests.random_schedules import shapes
from tests.texts import interleaved, schedule_of, zb_h1

RIGHT = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
LOWERED = """
0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
"""
NEEDS_TWO_BUFFERS = """
0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3
1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1RECV_F3 1F3 1B3 1SEND_B3
"""


def found(text: str, num_microbatches: int = 2) -> list[Violation]:
    return verify(schedule_of(text, num_microbatches=num_microbatches))


def brief(violations: list[Violation]) -> list[str]:
    return [f"{each.fault.name} {each.rank}@{each.position}: {each.message}" for each in violations]


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.mark.parametrize("text", [RIGHT, LOWERED])
def test_right_schedule_has_no_violation(text: str) -> None:
    assert found(text) == []


# Every action once


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0F1 ", "", "MISSING 0@None: 0F1 is missing on rank 0"),
        (" 1B1", "", "MISSING 1@None: 1B1 is missing on rank 1"),
        ("1B0", "1I0", "MISSING 1@None: 1W0 is missing on rank 1"),
        ("1B0", "1W0", "MISSING 1@None: 1I0 is missing on rank 1"),
        ("1B0", "1W0 1B0", "DOUBLED 1@2: 1B0 was done before in part, as 1W0"),
        ("0B1", "0B1 0B1", "DOUBLED 0@4: 0B1 was done before"),
        ("0F1", "0F0 0F1", "DOUBLED 0@1: 0F0 was done before"),
        ("1B0", "1B0 1I0", "DOUBLED 1@2: 1I0 was done before"),
        ("1B0", "1B0 1W0", "DOUBLED 1@2: 1W0 was done before"),
        ("1B0", "1I0 1B0", "DOUBLED 1@2: 1B0 was done before in part, as 1I0"),
        ("1B0", "1I0 1W0 1B0", "DOUBLED 1@3: 1B0 was done before"),
        ("1B0", "1R0 1R0 1B0", "DOUBLED 1@2: 1R0 was done before"),
        ("0F1", "1F1 0F1", "MISPLACED 0@1: 1F1 stands on rank 0; stage 1 is on rank 1"),
        ("0F1", "2F1 0F1", "MISPLACED 0@1: 2F1 is of stage 2; there are 2"),
        ("0F1", "0F1 0F2", "MISPLACED 0@2: 0F2 is of micro-batch 2; there are 2"),
    ],
)
def test_wrong_count_or_place_is_named(old: str, new: str, message: str) -> None:
    assert brief(found(changed(RIGHT, old, new))) == [message]


def test_stage_and_microbatch_before_the_first_are_misplaced() -> None:
    schedule = schedule_of("0F0 0B0")
    action = schedule.program(0)[0]
    wrong = [type(action)(action.kind, -1, 0), type(action)(action.kind, 0, -1)]
    messages = [each.message for each in verify(schedule.with_programs([[*schedule.program(0), *wrong]]))]
    assert messages == ["-1F0 is of stage -1; there are 1", "0F-1 is of micro-batch -1; there are 1"]


def test_microbatch_that_is_missing_as_a_whole_is_two_faults_a_stage() -> None:
    assert [str(each.action) for each in found(RIGHT, num_microbatches=3)] == ["0F2", "0B2", "1F2", "1B2"]


def test_every_repetition_is_named() -> None:
    assert brief(found(changed(RIGHT, "0F1", "0F1 0F1 0F1"))) == [
        "DOUBLED 0@2: 0F1 was done before",
        "DOUBLED 0@3: 0F1 was done before",
    ]


def test_moved_action_is_misplaced_once() -> None:
    assert brief(found("0F0 0F1 0B0\n1F0 1B0 1F1 1B1 0B1")) == [
        "MISPLACED 1@4: 0B1 stands on rank 1; stage 0 is on rank 0"
    ]


@pytest.mark.parametrize("action", ["0B0", "0I0", "0W0", "0R0", "0SEND_B0", "0RECV_B0"])
def test_backward_in_forward_only_is_misplaced(action: str) -> None:
    violations = verify(schedule_of(f"0F0 {action}\n1F0", is_forward_only=True))
    assert brief(violations) == [f"MISPLACED 0@1: {action} stands in a schedule of forwards only"]


def test_forward_only_needs_its_forwards() -> None:
    assert verify(schedule_of("0F0\n1F0", is_forward_only=True)) == []
    assert brief(verify(schedule_of("0F0\n", is_forward_only=True, ranks=(0,), num_microbatches=2))) == [
        "MISSING 0@None: 0F1 is missing on rank 0"
    ]


# Order on a rank


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0B0 0F0 0F1 0B1", "0@0: 0B0 stands before 0F0, which it needs"),
        ("0F0 0W0 0I0 0F1 0B1", "0@1: 0W0 stands before 0I0, which it needs"),
        ("0F0 0B0 0R0 0F1 0B1", "0@1: 0B0 stands before 0R0, which it needs"),
        ("0F0 0I0 0R0 0W0 0F1 0B1", "0@1: 0I0 stands before 0R0, which it needs"),
        ("0R0 0F0 0B0 0F1 0B1", "0@0: 0R0 stands before 0F0, which it needs"),
    ],
)
def test_dependency_backwards_is_named(text: str, message: str) -> None:
    assert brief(found(text)) == [f"BACKWARDS {message}"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "0@0: 0SEND_F0 stands before 0F0, which it needs"),
        ("1B0 1SEND_B0", "1SEND_B0 1B0", "1@2: 1SEND_B0 stands before 1B0, which it needs"),
        ("1RECV_F0 1F0", "1F0 1RECV_F0", "1@0: 1F0 stands before 1RECV_F0, which it needs"),
        ("0RECV_B1 0B1", "0B1 0RECV_B1", "0@6: 0B1 stands before 0RECV_B1, which it needs"),
    ],
)
def test_transfer_on_the_wrong_side_of_its_computation_is_named(old: str, new: str, message: str) -> None:
    assert brief(found(changed(LOWERED, old, new))) == [f"BACKWARDS {message}"]


def test_stages_of_one_rank_wait_for_each_other() -> None:
    schedule = schedule_of("1F0 0F0 1B0 0B0", ranks=(0, 0))
    assert brief(verify(schedule)) == ["BACKWARDS 0@0: 1F0 stands before 0F0, which it needs"]


# Transfers


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        (" 0SEND_F1", "", ["UNMATCHED 1@4: 1RECV_F1 has no 0SEND_F1 to match it"]),
        (
            " 1RECV_F1",
            "",
            [
                "UNMATCHED 0@3: 0SEND_F1 has no 1RECV_F1 to match it",
                "UNMATCHED 1@4: 1F1 needs 0F1 of another rank, and no 1RECV_F1 brings it",
            ],
        ),
        (" 1SEND_B0", "", ["UNMATCHED 0@4: 0RECV_B0 has no 1SEND_B0 to match it"]),
        ("1B1", "1B1 1SEND_F1", ["UNMATCHED 1@7: 1SEND_F1 has no 2RECV_F1 to match it"]),
        ("0F0", "0RECV_F0 0F0", ["UNMATCHED 0@0: 0RECV_F0 has no -1SEND_F0 to match it"]),
    ],
)
def test_transfer_without_its_other_end_is_named(old: str, new: str, messages: list[str]) -> None:
    assert brief(found(changed(LOWERED, old, new))) == messages


def test_crossing_value_that_nothing_brings_is_named() -> None:
    without = changed(changed(LOWERED, " 0SEND_F1", ""), " 1RECV_F1", "")
    assert brief(found(without)) == ["UNMATCHED 1@4: 1F1 needs 0F1 of another rank, and no 1RECV_F1 brings it"]


def test_receives_out_of_order_are_named() -> None:
    text = changed(changed(LOWERED, "1RECV_F0 ", ""), "1F0 ", "1RECV_F1 1RECV_F0 1F0 ")
    text = changed(text, "1SEND_B0 1RECV_F1", "1SEND_B0")
    assert brief(found(text)) == ["UNMATCHED 1@0: 1RECV_F1 is posted out of the order in which rank 0 sends"]


def test_transfer_inside_a_rank_is_refused() -> None:
    schedule = schedule_of("0F0 0SEND_F0 1RECV_F0 1F0", ranks=(0, 0), is_forward_only=True)
    assert brief(verify(schedule)) == [
        "UNMATCHED 0@1: 0SEND_F0 stays on rank 0, whose stages hand over without a transfer",
        "UNMATCHED 0@2: 1RECV_F0 stays on rank 0, whose stages hand over without a transfer",
    ]


# Deadlock


def test_cycle_across_ranks_is_a_deadlock() -> None:
    assert brief(found("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")) == [
        "DEADLOCK 0@1: rank 0 never gets past 0B0: it waits for 1B0; no number of buffers helps",
        "DEADLOCK 1@0: rank 1 never gets past 1F1: it waits for 0F1; no number of buffers helps",
    ]


def test_program_that_needs_two_buffers_says_so() -> None:
    why = "it waits for room in its channel, which buffers one message; 2 buffered messages per channel would do"
    assert brief(found(NEEDS_TWO_BUFFERS, num_microbatches=4)) == [
        f"DEADLOCK 0@7: rank 0 never gets past 0SEND_F3: {why}",
        f"DEADLOCK 1@7: rank 1 never gets past 1SEND_B1: {why}",
    ]


# Limits


@pytest.mark.parametrize(("limit", "over"), [(4, []), (3, [0]), (2, [0, 1]), (0, [0, 1, 2, 3])])
def test_peak_count_above_its_limit_names_the_rank(limit: int, over: list[int]) -> None:
    violations = verify(made("1f1b", num_ranks=4, num_microbatches=8), Limits(held_to_input_grad=limit))
    assert brief(violations) == [
        f"OVER_LIMIT {rank}@None: rank {rank} holds {4 - rank} micro-batches at its peak; the limit is {limit}"
        for rank in over
    ]


def held(to_input_grad: int, to_weight_grad: int = 0, num_stages: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        bytes_held_to_input_grad=[to_input_grad] * num_stages,
        bytes_held_to_weight_grad=[to_weight_grad] * num_stages,
        bytes_held_to_recompute=[1] * num_stages,
    )


def test_peak_bytes_above_their_limit_name_the_rank() -> None:
    limits = Limits(activation_bytes=300, held=held(100))
    assert brief(verify(made("1f1b", num_ranks=4, num_microbatches=8), limits)) == [
        "OVER_LIMIT 0@None: rank 0 holds 400 bytes at its peak; the limit is 300"
    ]


def test_bytes_that_wait_for_their_weight_gradient_count() -> None:
    peaks = [4 * 10, 3 * 10 + 1 * 4, 2 * 10 + 2 * 4, 1 * 10 + 3 * 4]
    messages = [each.message for each in verify(zb_h1(), Limits(activation_bytes=21, held=held(10, 4)))]
    assert messages == [
        f"rank {rank} holds {peak} bytes at its peak; the limit is 21" for rank, peak in enumerate(peaks)
    ]


def test_recomputation_brings_bytes_under_a_limit() -> None:
    schedule, limits = made("gpipe", num_ranks=4, num_microbatches=8), Limits(activation_bytes=120, held=held(100))
    assert [each.fault for each in verify(schedule, limits)] == [Fault.OVER_LIMIT] * 4
    assert verify(add_recompute(schedule, range(4)), limits) == []


def test_limit_of_bytes_needs_what_is_held() -> None:
    with pytest.raises(CostError, match="a limit of 300 bytes was given without what a micro-batch holds"):
        Limits(activation_bytes=300)


def test_limits_of_a_broken_schedule_are_left_alone() -> None:
    limits = Limits(held_to_input_grad=0, activation_bytes=0, held=held(100, num_stages=1))
    assert [each.fault for each in verify(schedule_of("0F0 7F0 0B0"), limits)] == [Fault.MISPLACED]


# What a violation shows


def test_violation_draws_the_place() -> None:
    text = changed(made_text("1f1b"), "0F6", "0F5")
    (doubled, _missing) = verify(schedule_of(text, num_microbatches=8))
    assert str(doubled).splitlines() == [
        "doubled action: 0F5 was done before",
        "  rank 0: … 0F4 0B1 0F5 0B2 0F5 0B3 0F7 0B4 0B5 …",
        "                            ^^^ here",
    ]


def made_text(name: str) -> str:
    programs = made(name, num_ranks=4, num_microbatches=8).programs
    return "\n".join(" ".join(map(str, program)) for program in programs)


def test_violation_without_a_place_draws_the_start() -> None:
    (missing,) = found(changed(RIGHT, "0F1 ", ""))
    assert str(missing) == "missing action: 0F1 is missing on rank 0\n  rank 0: 0F0 0B0 0B1"


@pytest.mark.parametrize("position", range(8))
def test_mark_stands_under_the_action(position: int) -> None:
    program = schedule_of(LOWERED, num_microbatches=2).program(0)
    doubled = (*program, program[position])
    schedule = schedule_of(LOWERED, num_microbatches=2)
    (violation,) = verify(schedule.with_programs([doubled, schedule.program(1)]))
    row, mark = violation.picture.splitlines()
    assert row[mark.index("^") : mark.rindex("^") + 1] == str(program[position])


def test_valid_schedule_is_returned() -> None:
    schedule = schedule_of(RIGHT, num_microbatches=2)
    assert require_valid(schedule) is schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0\n1F0 1F0", r"(?s)schedule 'custom' breaks 3 rules:\n.*1F0 was done.*0B0 is.*1B0 is"),
        ("0F0\n1F0 1B0", r"schedule 'custom' breaks a rule:\nmissing action: 0B0 is"),
    ],
)
def test_invalid_schedule_raises_with_every_violation(text: str, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        require_valid(schedule_of(text))


# Whole schedules


@pytest.mark.parametrize(
    ("schedule", "to_input_grad", "to_weight_grad"),
    [(zb_h1(), (4, 3, 2, 1), (4, 4, 4, 4)), (interleaved(), (5, 3), (5, 3))],
)
def test_written_schedules_are_right(
    schedule: Schedule, to_input_grad: tuple[int, ...], to_weight_grad: tuple[int, ...]
) -> None:
    assert verify(schedule) == verify(add_transfers(schedule)) == []
    assert peak_held_to_input_grad(schedule) == to_input_grad
    assert peak_held_to_weight_grad(schedule) == to_weight_grad


def test_csv_with_halves_and_idle_slots_is_right() -> None:
    schedule = parse_csv("0F0,0F1,,,0I0,0W0,0I1,0W1\n,1F0,1I0,,1F1,1I1,1W0,1W1,,\n")
    assert verify(schedule) == []
    assert (schedule.num_stages, schedule.num_microbatches) == (2, 2)


@settings(max_examples=15)
@given(**shapes)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("forward_only", [False, True])
def test_generated_schedules_are_right(name: str, forward_only: bool, num_ranks: int, num_microbatches: int) -> None:
    schedule = made(name, num_ranks=num_ranks, num_microbatches=num_microbatches, forward_only=forward_only)
    lowered = add_transfers(schedule)
    assert verify(schedule) == verify(lowered) == []
    assert buffers_needed(lowered) == 1
