from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given

from pipeloom.errors import UnsupportedShape
from pipeloom.ir import Action, Kind, Placement, Schedule
from pipeloom.passes import add_transfers
from pipeloom.schedules import gpipe, one_f_one_b
from tests.random_schedules import runnable_schedules


def test_counts():
    made = one_f_one_b(4, 8)
    assert (made.num_ranks, made.num_stages, made.num_microbatches, len(made)) == (4, 4, 8, 64)
    assert made.rank_of(3) == 3
    assert made.program(3)[:2] == (Action(Kind.FORWARD, 3, 0), Action(Kind.BACKWARD, 3, 0))


@given(runnable_schedules())
def test_iteration_is_rank_by_rank(schedule):
    assert list(schedule) == [action for program in schedule.programs for action in program]
    assert schedule.actions == set(schedule)


def test_printed_schedule_is_a_line_for_each_rank():
    assert str(gpipe(2, 2)) == "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1"
    assert repr(gpipe(2, 2)).startswith("Schedule(placement=")


def test_schedules_are_equal_under_any_name():
    made = gpipe(2, 3)
    renamed = replace(made, name="mine")
    assert (renamed == made, hash(renamed) == hash(made)) == (True, True)
    assert renamed.name == "mine"


@pytest.mark.parametrize(
    "other",
    [gpipe(2, 4), gpipe(3, 3), one_f_one_b(2, 3), add_transfers(gpipe(2, 3))],
    ids=["more-micro-batches", "more-ranks", "other-order", "lowered"],
)
def test_digest_tells_schedules_apart(other):
    assert gpipe(2, 3).digest == gpipe(2, 3).digest != other.digest


def test_digest_is_the_same_everywhere():
    """Ranks of several machines compare it, so it may depend on nothing but what is done."""
    assert gpipe(2, 2).digest == "4cb3c1cb8ac85274381d3278285184b1e64abc52ce9d1db013deeccae017ab51"


def test_schedules_are_frozen():
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'programs'"):
        gpipe(2, 2).programs = ()


def test_lowered_holds_transfers():
    made = gpipe(2, 2)
    assert (made.is_lowered, add_transfers(made).is_lowered) == (False, True)


def test_one_rank_has_nothing_to_transfer():
    assert add_transfers(gpipe(1, 2)) == gpipe(1, 2)


def test_accumulation_order_is_that_of_weight_gradients():
    kinds = [(Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.INPUT_GRAD, 0), (Kind.BACKWARD, 1), (Kind.WEIGHT_GRAD, 0)]
    program = tuple(Action(kind, 0, microbatch) for kind, microbatch in kinds)
    assert Schedule(Placement.single(1), (program,), 2).accumulation_order(0) == (1, 0)


def test_programs_can_be_replaced():
    made = gpipe(2, 2)
    emptied = made.with_programs([[] for _ in made.programs])
    assert (emptied.programs, len(emptied), emptied.name) == (((), ()), 0, "gpipe")
    assert len(made) == 8


def test_program_for_each_rank():
    with pytest.raises(UnsupportedShape, match="1 programs were given for a placement on 2 ranks"):
        Schedule(Placement.single(2), ((),), num_microbatches=1)


@pytest.mark.parametrize("num_microbatches", [0, -3])
def test_no_micro_batch_is_refused(num_microbatches):
    with pytest.raises(UnsupportedShape, match=f"{num_microbatches} micro-batches were given; at least 1"):
        Schedule(Placement.single(1), ((),), num_microbatches)
