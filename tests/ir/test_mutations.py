"""`verify` against the same rules written differently, on schedules that one change has, or has not, broken."""

from dataclasses import dataclass

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from pipeloom.ir import Action, Schedule
from pipeloom.ir.verify import verify
from pipeloom.passes import add_recompute, add_transfers
from pipeloom.schedules import schedule as made
from tests.random_schedules import links_of, runnable_schedules
from tests.rules import is_right
from tests.texts import schedule_of

Programs = list[list[Action]]


@dataclass(frozen=True)
class Places:
    """Where a change is made: an action, and where it goes."""

    rank: int
    position: int
    to_rank: int
    to_position: int


def swap(programs: Programs, at: Places) -> None:
    program, other = programs[at.rank], at.to_position % len(programs[at.rank])
    program[at.position], program[other] = program[other], program[at.position]


def drop(programs: Programs, at: Places) -> None:
    del programs[at.rank][at.position]


def double(programs: Programs, at: Places) -> None:
    programs[at.rank].insert(at.to_position, programs[at.rank][at.position])


def move(programs: Programs, at: Places) -> None:
    programs[at.to_rank].insert(at.to_position, programs[at.rank].pop(at.position))


MUTATIONS = [swap, drop, double, move]


@st.composite
def generated(draw: st.DrawFn) -> Schedule:
    """GPipe or 1F1B, of any small shape, with links, for training or not, recomputed or not, lowered or not."""
    schedule = made(
        draw(st.sampled_from(["gpipe", "1f1b"])),
        num_ranks=draw(st.integers(1, 6)),
        num_microbatches=draw(st.integers(1, 8)),
        forward_only=draw(st.booleans()),
    )
    schedule = schedule.with_links(draw(links_of(schedule.num_stages)))
    schedule = add_recompute(schedule, draw(st.sets(st.integers(0, 5))))
    return add_transfers(schedule) if draw(st.booleans()) else schedule


@st.composite
def places(draw: st.DrawFn, schedule: Schedule) -> Places:
    rank = draw(st.integers(0, schedule.num_ranks - 1))
    length = len(schedule.program(rank))
    position = draw(st.integers(0, length - 1))
    near = st.integers(max(0, position - 3), position + 3)  # far swaps break nearly always
    return Places(rank, position, draw(st.integers(0, schedule.num_ranks - 1)), draw(near | st.integers(0, length)))


def assert_verify_agrees_with_the_rules(schedule: Schedule) -> None:
    note("\n".join(" ".join(map(str, program)) for program in schedule.programs))
    assert (verify(schedule) == []) == is_right(schedule)


@settings(max_examples=200)
@given(st.data())
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_one_change_is_reported_exactly_if_it_breaks_a_rule(mutate: object, data: st.DataObject) -> None:
    schedule = data.draw(generated())
    programs = [list(program) for program in schedule.programs]
    mutate(programs, data.draw(places(schedule)))  # type: ignore[operator]
    assert_verify_agrees_with_the_rules(schedule.with_programs(programs))


@settings(max_examples=100)
@given(st.data())
@pytest.mark.parametrize("mutate", [swap, move])
def test_random_schedules_are_judged_alike(mutate: object, data: st.DataObject) -> None:
    """Several stages a rank, split backwards and recomputation, in orders that no generator makes."""
    schedule = data.draw(runnable_schedules(has_links=data.draw(st.booleans())))
    schedule = add_transfers(schedule) if data.draw(st.booleans()) else schedule
    assert_verify_agrees_with_the_rules(schedule)
    programs = [list(program) for program in schedule.programs]
    mutate(programs, data.draw(places(schedule)))  # type: ignore[operator]
    assert_verify_agrees_with_the_rules(schedule.with_programs(programs))


@given(generated())
def test_unchanged_schedules_are_right_by_both(schedule: Schedule) -> None:
    assert is_right(schedule)
    assert verify(schedule) == []


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0F0 0B0\n1F0 1B0",
        "0F0\n1F0 1B0",
        "0B0 0F0\n1F0 1B0",
        "0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0",
        "0F0 0B0 1F0\n1B0",
        "0F0 0I0\n1F0 1B0",
        "0F0 0B0 0W0\n1F0 1B0",
    ],
)
def test_the_other_rules_find_faults_too(text: str) -> None:
    assert not is_right(schedule_of(text))
