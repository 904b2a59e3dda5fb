"""Schedules of forwards alone: for evaluation, and as what is left of a training schedule."""

import pytest
from hypothesis import given

from pipeloom.ir import Kind, Placement
from pipeloom.ir.verify import verify
from pipeloom.passes import add_transfers
from pipeloom.schedules.forward_only import evaluation, forward_only
from tests.random_schedules import placements
from tests.texts import text_of, zb_h1


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((0, 1), ["0F0 0F1", "1F0 1F1"]),
        ((0, 1, 0, 1), ["0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1"]),
        ((0, 1, 1, 0), ["0F0 0F1 3F0 3F1", "1F0 1F1 2F0 2F1"]),
    ],
)
def test_a_stage_ends_before_its_rank_begins_the_next(ranks: tuple[int, ...], expected: list[str]) -> None:
    """Micro-batch after micro-batch would be right too, but a rank would wait for each to come back to it."""
    assert text_of(evaluation(Placement(ranks), 2)) == expected


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
@pytest.mark.parametrize(
    "placement", [Placement.v(4), Placement.wave(3, 2), Placement.bidirectional(4), Placement.bidirectional(2)], ids=str
)
def test_evaluation_runs_where_ranks_turn_or_hold_two_replicas(placement: Placement, num_microbatches: int) -> None:
    schedule = evaluation(placement, num_microbatches)
    assert verify(schedule) == verify(add_transfers(schedule)) == []
    assert len(schedule) == placement.num_stages * num_microbatches


def test_evaluation_of_two_replicas() -> None:
    assert text_of(evaluation(Placement.bidirectional(2), 3)) == ["0F0 0F1 1F2", "0F2 1F0 1F1"]


@given(placements())
def test_evaluation_runs_on_any_placement(placement: Placement) -> None:
    schedule = evaluation(placement, 3)
    assert verify(schedule) == verify(add_transfers(schedule)) == []
    assert schedule.placement == placement


def test_forwards_are_kept_in_their_order() -> None:
    schedule = forward_only(add_transfers(zb_h1()))
    assert text_of(schedule)[2] == " ".join(f"2F{i}" for i in range(8))
    assert {action.kind for action in schedule} == {Kind.FORWARD}
    assert verify(schedule) == []
