from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import Costs
from pipeloom.ir import Kind, Schedule
from pipeloom.ir.peaks import peak_activation_bytes
from pipeloom.ir.verify import verify
from pipeloom.passes import add_recompute, add_transfers, early_recompute, without_recompute
from pipeloom.schedules import schedule as made
from pipeloom.sim import simulate
from tests.random_schedules import schedules_and_costs
from tests.texts import schedule_of, text_of

HELD = {"bytes_held_to_input_grad": 100, "bytes_held_to_recompute": 5}


def costs_of(num_stages: int, **more: object) -> Costs:
    times = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0}
    return Costs.uniform(num_stages, **(times | HELD | more))  # type: ignore[arg-type]


def early(schedule: Schedule, costs: Costs, **options: object) -> Schedule:
    return early_recompute(schedule, partial(simulate, costs=costs), held=costs, **options)  # type: ignore[arg-type]


def test_a_wait_that_is_long_enough_is_used() -> None:
    """The first rank has to wait for the second one's forwards; then the gradient of 1B1 has to wait for 0R1."""
    schedule = schedule_of("0F0 0F1 0R0 0B0 0R1 0B1\n1F0 1F1 1B0 1B1", num_microbatches=2)
    quick, slow = costs_of(2, forward_s=[3.0, 1.0]), costs_of(2, forward_s=[3.0, 5.0])
    assert early(schedule, quick) == schedule
    found = early(schedule, slow)
    assert text_of(found) == ["0F0 0F1 0R0 0R1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert [simulate(each, slow).makespan_s for each in (schedule, found)] == [22.0, 19.0]


def test_what_does_not_shorten_the_step_stays() -> None:
    """On GPipe's first ranks there is room for every R, and the last rank, which never waits, sets the pace."""
    schedule = made("gpipe-recompute", num_ranks=4, num_microbatches=8)
    assert early(schedule, costs_of(4)) == schedule


@pytest.mark.parametrize(
    ("name", "costs", "makespans_s"),
    [
        ("v-min", costs_of(8), (59.0, 75.0, 70.0)),
        ("hanayo", costs_of(8, transfer_s=0.5), (79.0, 91.0, 81.0)),
        ("zb-v", costs_of(8, transfer_s=1.0), (65.0, 76.0, 70.0)),
    ],
)
def test_most_of_a_recomputation_can_be_hidden(name: str, costs: Costs, makespans_s: tuple[float, ...]) -> None:
    without = made(name, num_ranks=4, num_microbatches=8)
    late = add_recompute(without, range(costs.num_stages))
    found = [simulate(each, costs).makespan_s for each in (without, late, early(late, costs))]
    assert tuple(found) == makespans_s


def test_a_rank_is_done_sooner_where_the_step_is_as_long() -> None:
    """Without a barrier between steps the longest rank counts: an R whose way back leaves the makespan may stay."""
    costs = costs_of(4, transfer_s=1.0)
    late = add_recompute(made("zb-2p", num_ranks=4, num_microbatches=8), range(4))
    found = [simulate(each, costs) for each in (late, early(late, costs))]
    assert [each.makespan_s for each in found] == [38.0, 38.0]
    assert [each.longest_rank_span_s for each in found] == [38.0, 37.0]


def test_memory_is_counted_and_limited() -> None:
    schedule = add_recompute(made("hanayo", num_ranks=4, num_microbatches=8), range(8))
    costs = costs_of(8)
    before, free = peak_activation_bytes(schedule, costs), early(schedule, costs)
    makespans_s = [simulate(each, costs).makespan_s for each in (schedule, free)]
    for limit in (max(before), 300, 500):
        found = early(schedule, costs, max_bytes=limit)
        assert max(peak_activation_bytes(found, costs)) <= limit
        makespans_s.insert(-1, simulate(found, costs).makespan_s)
    assert makespans_s == sorted(makespans_s, reverse=True)
    assert max(peak_activation_bytes(free, costs)) > 500
    assert makespans_s[0] > makespans_s[2] > makespans_s[-1]


def test_a_forward_that_runs_again_holds_its_activations_while_it_runs() -> None:
    """Beside those of a micro-batch whose R came early."""
    schedule = schedule_of("0F0 0R0 0F1 0R1 0B0 0B1", num_microbatches=2)
    assert peak_activation_bytes(schedule, costs_of(1)) == (200,)
    assert peak_activation_bytes(schedule_of("0F0 0F1 0R0 0B0 0R1 0B1", num_microbatches=2), costs_of(1)) == (105,)


def test_nothing_to_move() -> None:
    for name in ("gpipe", "zb-v"):
        schedule = made(name, num_ranks=2, num_microbatches=4)
        assert early(schedule, costs_of(schedule.num_stages)) == schedule


@pytest.mark.parametrize("has_cost", [True, False])
def test_nothing_comes_between_a_pair(has_cost: bool) -> None:
    schedule = add_recompute(made("dualpipe-v", num_ranks=4, num_microbatches=8), range(8))
    costs = costs_of(8, transfer_s=1.0, **({"overlap_s": 2.5} if has_cost else {}))
    found = early(schedule, costs)
    assert verify(found) == []
    assert simulate(found, costs).makespan_s < simulate(schedule, costs).makespan_s


def places(schedule: Schedule) -> dict[str, int]:
    """Per R, how many actions that are none stand before it on its rank."""
    found = {}
    for program in schedule.programs:
        num_before = 0
        for action in program:
            if action.kind is Kind.RECOMPUTE:
                found[str(action)] = num_before
            else:
                num_before += 1
    return found


@settings(max_examples=100, deadline=None)
@given(schedules_and_costs(), st.booleans(), st.none() | st.integers(0, 400))
def test_the_step_is_never_longer(pair: tuple[Schedule, Costs], is_lowered: bool, max_bytes: int | None) -> None:
    schedule, times = pair
    schedule = add_transfers(schedule) if is_lowered else schedule
    costs = Costs.uniform(
        times.num_stages,
        forward_s=times.forward_s,
        input_grad_s=times.input_grad_s,
        weight_grad_s=times.weight_grad_s,
        transfer_s=times.transfer_s,
        transfer_bytes_per_s=times.transfer_bytes_per_s,
        boundary_bytes=times.boundary_bytes,
        **HELD,
    )
    found = early(schedule, costs, max_bytes=max_bytes)
    assert verify(found) == []
    assert found.actions == schedule.actions
    assert without_recompute(found) == without_recompute(schedule)
    before, after = simulate(schedule, costs), simulate(found, costs)
    assert after.makespan_s <= before.makespan_s
    assert after.longest_rank_span_s <= before.longest_rank_span_s
    peaks = zip(peak_activation_bytes(schedule, costs), peak_activation_bytes(found, costs), strict=True)
    assert max_bytes is None or all(now <= max(was, max_bytes) for was, now in peaks)
    was_at, is_at = places(schedule), places(found)
    assert all(is_at[again] <= was_at[again] for again in was_at)
