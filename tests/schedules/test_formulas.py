"""Every promise of the generators that is a formula, over all shapes (GPipe section 2.3, PipeDream-Flush 2.2)."""

import pytest
from hypothesis import given

from pipeloom.cost import Costs
from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.verify import verify
from pipeloom.passes import add_transfers
from pipeloom.schedules import GENERATORS, gpipe, one_f_one_b, schedule
from pipeloom.sim import simulate
from tests.random_schedules import shapes

every_generator = pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
every_name = pytest.mark.parametrize("name", GENERATORS)


def in_ticks(made: Schedule):
    return simulate(made, Costs.unit(made.num_stages))


@every_generator
@given(**shapes)
def test_makespan_and_bubble(generator, num_ranks, num_microbatches):
    """F takes 1 and B 2, so a step takes 3 (m + p − 1), of which 3 (p − 1) are idle on every rank."""
    timeline = in_ticks(generator(num_ranks, num_microbatches))
    slots = num_microbatches + num_ranks - 1
    assert timeline.makespan_s == timeline.longest_rank_span_s == 3 * slots
    assert timeline.bubble_fraction == pytest.approx((num_ranks - 1) / slots)
    assert timeline.busy_s == (3.0 * num_microbatches,) * num_ranks


@every_generator
@given(**shapes)
def test_bubble_with_other_costs(generator, num_ranks, num_microbatches):
    """The bubble is (p − 1)(T_F + T_B) for any costs that are equal on all stages."""
    costs = Costs.uniform(num_ranks, forward_s=2.0, input_grad_s=3.0, weight_grad_s=1.5)
    makespan_s = simulate(generator(num_ranks, num_microbatches), costs).makespan_s
    assert makespan_s == pytest.approx((num_microbatches + num_ranks - 1) * 6.5)


@given(**shapes)
def test_gpipe_holds_every_micro_batch(num_ranks, num_microbatches):
    timeline = in_ticks(gpipe(num_ranks, num_microbatches))
    assert timeline.peak_held_to_input_grad == (num_microbatches,) * num_ranks
    assert timeline.peak_held_to_weight_grad == (num_microbatches,) * num_ranks


@given(**shapes)
def test_1f1b_holds_one_for_each_rank_from_it_on(num_ranks, num_microbatches):
    timeline = in_ticks(one_f_one_b(num_ranks, num_microbatches))
    expected = tuple(min(num_ranks - rank, num_microbatches) for rank in range(num_ranks))
    assert timeline.peak_held_to_input_grad == expected
    assert timeline.peak_held_to_weight_grad == expected


@every_name
@given(**shapes)
def test_forward_only(name, num_ranks, num_microbatches):
    """Evaluation takes m + p − 1 ticks, of which a rank spans m, and holds nothing."""
    made = schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, forward_only=True)
    timeline = in_ticks(made)
    assert timeline.makespan_s == num_microbatches + num_ranks - 1
    assert timeline.longest_rank_span_s == num_microbatches
    assert timeline.bubble_fraction_unsynchronised == 0.0
    nothing = (0,) * num_ranks
    assert timeline.peak_held_to_input_grad == timeline.peak_held_to_weight_grad == nothing


@every_generator
@given(**shapes)
def test_gradients_add_up_ascending(generator, num_ranks, num_microbatches):
    made = generator(num_ranks, num_microbatches)
    orders = {made.accumulation_order(stage) for stage in range(num_ranks)}
    assert orders == {tuple(range(num_microbatches))}


@every_generator
@given(**shapes)
def test_every_action_stands_once(generator, num_ranks, num_microbatches):
    made = generator(num_ranks, num_microbatches)
    expected = {
        Action(kind, stage, microbatch)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for stage in range(num_ranks)
        for microbatch in range(num_microbatches)
    }
    assert made.actions == expected
    assert len(made) == len(expected)


@every_name
@pytest.mark.parametrize("is_forward_only", [False, True])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 1), (3, 7), (8, 3), (16, 20)])
def test_verifies_with_transfers_and_without(name, is_forward_only, num_ranks, num_microbatches):
    made = schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, forward_only=is_forward_only)
    assert verify(made) == []
    assert verify(add_transfers(made)) == []
