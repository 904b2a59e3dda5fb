"""Schedules that update weights in their programs: which changes `verify` refuses, and which versions are used."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from pipeloom.errors import NotationError
from pipeloom.ir import Action, Kind, Pin, Schedule
from pipeloom.ir.notation import parse_csv
from pipeloom.ir.verify import Fault, verify
from pipeloom.ir.versions import peak_versions_held, used_versions
from pipeloom.schedules import ENTRIES, schedule
from tests.rules import is_right

NAMES = [name for name, entry in ENTRIES.items() if entry.is_asynchronous]
F, B, U = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE


def schedule_of(text: str) -> Schedule:
    return parse_csv(text.replace(" ", ","))


def without_updates(made: Schedule) -> Schedule:
    return replace(made, pins=frozenset()).with_programs(
        [action for action in program if action.kind is not U] for program in made.programs
    )


def has_right_updates(made: Schedule) -> bool:
    """The rules once more: every stage updates after the same micro-batches, from the gradients of each batch alone."""
    ends = sorted({action.microbatch for action in made if action.kind is U})
    if ends and ends[-1] != made.num_microbatches - 1:
        return False
    batch_of = {i: sum(end < i for end in ends) for i in range(made.num_microbatches)}
    for stage, rank in enumerate(made.placement.ranks):
        own = [action for action in made.program(rank) if action.stage == stage]
        order = [(batch_of[action.microbatch], action.kind is U) for action in own if action.kind in (B, U)]
        if Counter(a.microbatch for a in own if a.kind is U) != Counter(ends) or (ends and order != sorted(order)):
            return False
        for forward, version in made.pins:
            if forward.stage == stage and version > sum(a.kind is U for a in own[: own.index(forward)]):
                return False
    return all(made.rank_of(a.stage) == rank for rank, p in enumerate(made.programs) for a in p if a.kind is U)


@settings(max_examples=300)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(["swap", "drop", "double", "move"]),
    st.tuples(*[st.integers(0, 999)] * 4),
)
def test_one_change_is_reported_exactly_if_it_breaks_a_rule(name, num_ranks, num_microbatches, how, places):
    made = schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    assert verify(made) == []
    rank, first, second, other = places
    programs = [list(program) for program in made.programs]
    row = programs[rank % num_ranks]
    first, second = first % len(row), second % len(row)
    if how == "swap":
        row[first], row[second] = row[second], row[first]
    elif how == "drop":
        del row[first]
    elif how == "double":
        row.insert(second, row[first])
    else:
        programs[other % num_ranks].insert(second, row.pop(first))
    changed = made.with_programs(programs)
    note(str(changed))
    is_fine = is_right(without_updates(changed)) and has_right_updates(changed)
    assert (verify(changed) == []) == is_fine


@pytest.mark.parametrize(
    ("text", "fault", "message"),
    [
        ("0F0 0F1 0B0 0U0 0B1", Fault.MISSING, "0U1 is missing on rank 0: the gradients of the last micro-batches"),
        ("0F0 0B0 0U0\n1F0 1B0", Fault.MISSING, "1U0 is missing on rank 1: other stages update after that"),
        ("0F0 0F1 0B0 0B1 0U0 0U1", Fault.VERSION, "0B1 stands before 0U0, which would take its gradient"),
        ("0F0 0F1 0B1 0U1 0B0", Fault.VERSION, "0B0 stands after 0U1, which needs its gradient"),
        ("0F0 0F1 0B0 0U0 0B1 0U1 0U1", Fault.DOUBLED, "0U1 was done before"),
        ("0F0 0U0 0B0", Fault.BACKWARDS, "0U0 stands before 0B0, which it needs"),
        ("0F0 0F1 0I0 0I1 0W0 0U0 0W1 0U1", Fault.VERSION, "0I1 stands before 0U0"),
        ("0F0@1 0B0 0U0", Fault.VERSION, "0F0 is pinned to version 1 of the weights; after 0 updates there is none"),
    ],
)
def test_faults_say_what_is_wrong(text, fault, message):
    violations = verify(schedule_of(text))
    assert violations[0].fault is fault
    assert message in violations[0].message


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({(Action(F, 0, 0), 0), (Action(F, 0, 0), 1)}, "0F0 is pinned to several versions of the weights: 0 1"),
        ({(Action(B, 0, 0), 0)}, "0B0 is pinned to a version of the weights; forwards are, and the rest follows"),
        ({(Action(F, 3, 0), 0)}, "3F0 is pinned to a version of the weights, but nobody does it"),
    ],
)
def test_pins_are_of_forwards_that_are_there_once(pins, message):
    made = replace(schedule_of("0F0 0B0 0U0"), pins=frozenset(Pin(*pin) for pin in pins))
    assert [message in each.message for each in verify(made)] == [True]


def test_two_copies_of_a_stage_are_not_updated_apart():
    made = schedule("chimera", num_ranks=2, num_microbatches=2)
    programs = [[*program, Action(U, program[-1].stage, program[-1].microbatch)] for program in made.programs]
    assert "would update one of two copies" in verify(made.with_programs(programs))[0].message


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if not entry.is_asynchronous])
def test_no_synchronous_schedule_updates_weights(name):
    made = schedule(name, num_ranks=4, num_microbatches=8)
    assert (made.updates, made.pins) == ((), frozenset())
    assert set(used_versions(made).values()) == {0}


def test_a_forward_uses_the_newest_weights_unless_it_is_pinned():
    made = schedule_of("0F0 0B0 0U0 0F1 0B1 0U1 0F2@1 0B2 0U2")
    assert used_versions(made) == {(0, 0): 0, (0, 1): 1, (0, 2): 1}
    assert peak_versions_held(made) == (2,)
    assert str(made) == "rank 0: 0F0 0B0 0U0 0F1 0B1 0U1 0F2@1 0B2 0U2"
    assert made.digest != replace(made, pins=frozenset()).digest


@given(st.integers(1, 8), st.integers(1, 40))
def test_versions_are_those_of_the_papers(num_ranks, num_microbatches):
    """PipeDream, section 3.3: w_k(t−n+k), and with vertical sync w_k(t−n+1); 2BW: W(t−1)."""
    stashed, synced, buffered = (
        used_versions(schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)) for name in NAMES
    )
    for (stage, i), version in stashed.items():
        assert version == max(0, i - num_ranks + stage + 1)
        assert synced[stage, i] == max(0, i - num_ranks + 1)
        assert buffered[stage, i] == max(0, i // num_ranks - 1)


@pytest.mark.parametrize("text", ["0B0@1", "0F0@", "0F0@-1", "0F@1", "0F0@1@2"])
def test_what_is_no_pinned_forward_is_refused(text):
    with pytest.raises(NotationError, match="is not an action"):
        parse_csv(text)
