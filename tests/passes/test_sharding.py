"""Where parameters are gathered and gradients reduced: a program computes only with what is there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.ir import Action, Kind, Placement, Schedule
from pipeloom.ir.notation import format_program
from pipeloom.ir.verify import Fault, verify
from pipeloom.passes import add_reductions, add_sharding, add_transfers, without_sharding
from tests.random_schedules import runnable_schedules

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


@given(runnable_schedules(), st.integers(1, 4))
def test_what_was_added_is_right_and_can_be_left_out(schedule, max_unsharded):
    made = add_reductions(add_sharding(schedule, max_unsharded))
    assert verify(made) == []
    assert without_sharding(made) == schedule
    assert without_sharding(add_transfers(made)) == add_transfers(schedule)
    for program in made.programs:
        there = peak = 0
        for action in program:
            there += (action.kind is Kind.UNSHARD) - (action.kind is Kind.RESHARD)
            peak = max(peak, there)
        assert there == 0
        assert peak <= max_unsharded


@given(runnable_schedules(), st.integers(1, 4))
def test_parameters_come_and_go_as_in_torch(schedule, max_unsharded):
    no_recompute = (tuple(a for a in program if a.kind is not Kind.RECOMPUTE) for program in schedule.programs)
    schedule = schedule.with_programs(no_recompute)  # for which torch has no word
    for rank, program in enumerate(schedule.programs):
        theirs = torch_schedules._add_unshard_reshard(
            [torch_schedules._Action.from_str(text) for text in format_program(program)], max_unsharded
        )
        ours = add_sharding(schedule, max_unsharded).program(rank)
        assert format_program(ours) == [str(action) for action in theirs]


def schedule_of(*texts):
    from pipeloom.ir.notation import parse_action

    return Schedule(Placement.single(1), (tuple(map(parse_action, texts)),), 1)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("0F0", "0B0", "0RESHARD"), "0RESHARD comes without an UNSHARD before it"),
        (("0UNSHARD", "0UNSHARD", "0F0", "0B0"), "0UNSHARD comes though the parameters are there already"),
        (("0UNSHARD", "0F0", "0RESHARD", "0B0"), "0B0 computes with parameters that are sharded"),
        (("0F0", "0REDUCE_GRAD", "0B0"), "the stage adds gradients up after it"),
        (("0F0", "0B0", "0REDUCE_GRAD", "0REDUCE_GRAD"), "the gradients of the stage were reduced before"),
        (("0REDUCE_GRAD",), "the stage adds no gradients up on this rank"),
    ],
)
def test_what_stands_in_the_wrong_place_is_found(texts, message):
    found = verify(schedule_of(*texts))
    assert found[0].fault is Fault.MISPLACED
    assert any(message in each.message for each in found)


def test_a_stage_that_is_not_on_the_rank_is_not_reduced_there():
    made = Schedule(Placement.single(2), ((Action(Kind.REDUCE_GRAD, 1, -1),), ()), 1)
    assert "0REDUCE_GRAD" not in str(made)
    assert "stage 1 is on rank 1" in verify(made)[0].message
