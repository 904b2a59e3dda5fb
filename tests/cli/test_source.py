import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cli.source import shape
from pipeloom.errors import UnsupportedShape

counts = st.integers(1, 64)


@given(counts, counts)
def test_any_two_give_the_third(num_ranks, stages_per_rank):
    num_stages = num_ranks * stages_per_rank
    expected = (num_ranks, stages_per_rank)
    assert shape(num_ranks, num_stages, None) == expected
    assert shape(num_ranks, None, stages_per_rank) == expected
    assert shape(None, num_stages, stages_per_rank) == expected
    assert shape(num_ranks, num_stages, stages_per_rank) == expected


@given(counts)
def test_one_stage_per_rank_by_default(count):
    assert shape(count, None, None) == shape(None, count, None) == (count, 1)


@given(counts, counts, counts)
def test_three_that_do_not_fit(num_ranks, num_stages, stages_per_rank):
    if num_ranks * stages_per_rank == num_stages:
        num_stages += 1
    with pytest.raises(UnsupportedShape, match=r"stages must be ranks × stages per rank"):
        shape(num_ranks, num_stages, stages_per_rank)


@pytest.mark.parametrize(
    ("given_counts", "message"),
    [
        ((3, 4, None), "4 stages and 3 ranks were given; every rank must hold as many stages"),
        ((None, 5, 2), "5 stages and 2 stages per rank were given; every rank must hold as many"),
        ((8, 4, None), "4 stages and 8 ranks were given"),
        ((None, None, 2), "the number of stages is missing"),
        ((None, None, None), "the number of stages is missing"),
    ],
)
def test_counts_that_do_not_fit(given_counts, message):
    with pytest.raises(UnsupportedShape, match=message):
        shape(*given_counts)


@given(counts, counts)
def test_the_schedules_own_stages_per_rank_by_default(num_ranks, own):
    assert shape(num_ranks, None, None, own) == shape(None, num_ranks * own, None, own) == (num_ranks, own)
