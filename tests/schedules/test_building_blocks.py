"""How V-Half and V-Min are made: what a row becomes, and what closing its gaps must not change."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import Costs
from pipeloom.ir import Kind
from pipeloom.schedules import building_blocks, schedule
from pipeloom.schedules.building_blocks import from_blocks
from pipeloom.schedules.shape import Shape
from pipeloom.sim import simulate

NAMES = {"Fa": 0, "Fb": 1, "Ib": 2, "Ia": 3, "Wb": 4, "Wa": 5, ".": -1}
every_block = pytest.mark.parametrize("name", ["v-half", "v-min"])


def row(text: str) -> list[int]:
    return [NAMES[word] for word in text.split()]


@pytest.mark.parametrize(
    ("given_row", "expected"),
    [
        ("Fa Fb Ib Ia", "Fa Fb Ib Ia Wb Wa"),
        ("Fa Fb Ib . Ia .", "Fa Fb Ib Wb Ia Wa"),
        ("Fa Fb . Ib Ia . .", "Fa Fb . Ib Ia Wb Wa"),
        ("Fa Fb Ia Fb Ib . .", "Fa Fb Ia Fb Ib Wb Wa"),
    ],
)
def test_weight_gradients_fill_free_slots_after_their_input_gradient(given_row, expected):
    assert building_blocks._with_weight_grads(row(given_row)) == row(expected)


def test_squeezed_rows_run_as_early_as_they_can():
    """On two ranks: the way down to rank 1, the turn there, and the way up."""
    rows = [row(". . Fa . . . . Fb . Ib . . . Ia"), row(". . . . Fa . Fb . . . . Ib Ia")]
    assert building_blocks._squeezed(rows) == [row("Fa . . Fb Ib . . Ia"), row(". Fa Fb . . Ib Ia")]


@every_block
@settings(max_examples=20, deadline=None)
@given(num_ranks=st.integers(1, 12), num_microbatches=st.integers(1, 40))
def test_no_rank_holds_more_than_the_repeated_block(name, num_ranks, num_microbatches):
    made = schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    most = 2 * ((num_ranks + 2) // 2 if name == "v-half" else (num_ranks + 4) // 3)
    timeline = simulate(made, Costs.unit(made.num_stages))
    assert max(timeline.peak_held_to_weight_grad) <= most
    if num_microbatches >= 2 * num_ranks:
        assert max(timeline.peak_held_to_weight_grad) == most


@every_block
def test_more_micro_batches_only_repeat_the_steady_phase(name):
    """The bubble is that of both ends, however long the middle is."""
    bubbles = set()
    for num_microbatches in (16, 17, 40, 64):
        made = schedule(name, num_ranks=8, num_microbatches=num_microbatches)
        bubbles.add(simulate(made, Costs.unit(16)).makespan_s - 6 * num_microbatches)
    assert len(bubbles) == 1


def test_any_block_makes_a_schedule():
    """V-ZB as a block: a micro-batch goes down and up at half speed, so it holds most."""
    made = from_blocks("custom", Shape(2, 6, 2), lambda rank: ((0, 9, 10, 17), (2, 3, 12, 13))[rank])
    kinds = [action.kind for action in made.program(0)]
    assert [kinds.count(kind) for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)] == [12, 12, 12]
    assert simulate(made, Costs.unit(4)).makespan_s < 6 * 6 + 18
