import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import UnsupportedShape
from pipeloom.ir import Placement
from tests.random_schedules import placements


def test_loop_goes_round():
    assert Placement.loop(3, 2).ranks == (0, 1, 2, 0, 1, 2)


def test_single_is_a_loop_of_one_round():
    assert Placement.single(4) == Placement.loop(4, 1) == Placement.of([0, 1, 2, 3])


@given(st.integers(1, 16), st.integers(1, 8))
def test_loop_by_its_definition(num_ranks, stages_per_rank):
    placement = Placement.loop(num_ranks, stages_per_rank)
    assert placement.ranks == tuple(stage % num_ranks for stage in range(num_ranks * stages_per_rank))
    assert (placement.num_ranks, placement.num_stages) == (num_ranks, num_ranks * stages_per_rank)


@given(placements())
def test_stages_of_ranks_are_all_stages(placement):
    stages = [stage for rank in range(placement.num_ranks) for stage in placement.stages_of(rank)]
    assert sorted(stages) == list(range(placement.num_stages))
    assert all(stage in placement.stages_of(placement.rank_of(stage)) for stage in stages)


def test_stages_of_a_v():
    assert Placement.of([0, 1, 1, 0]).stages_of(0) == (0, 3)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "a placement of no stages was given; at least one stage is needed"),
        ([0, 2], r"placement \[0, 2\] leaves rank 1 without a stage; every rank must hold at least one"),
        ([1], "leaves rank 0 without a stage"),
        ([0, -1], r"placement \[0, -1\] names rank -1; ranks count from 0"),
    ],
)
def test_rank_without_a_stage_is_refused(ranks, message):
    with pytest.raises(UnsupportedShape, match=message):
        Placement.of(ranks)


@pytest.mark.parametrize(
    ("num_ranks", "stages_per_rank", "message"),
    [(0, 1, "0 ranks were given"), (-1, 1, "-1 ranks were given"), (2, 0, "0 stages per rank were given")],
)
def test_loop_of_nothing_is_refused(num_ranks, stages_per_rank, message):
    with pytest.raises(UnsupportedShape, match=f"{message}; at least 1 is needed"):
        Placement.loop(num_ranks, stages_per_rank)
