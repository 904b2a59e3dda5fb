"""Every promise of the generators, over all shapes: each verifies, and takes and holds what its formulas say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import Costs
from pipeloom.ir import Kind, Schedule, Timeline
from pipeloom.ir.verify import verify
from pipeloom.ir.versions import peak_versions_held
from pipeloom.passes import add_transfers
from pipeloom.schedules import ENTRIES, schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Times
from pipeloom.schedules.shape import Shape
from pipeloom.sim import simulate

every_schedule = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)

HALVES = frozenset({Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})


@st.composite
def shapes_of(draw: st.DrawFn, entry: Entry) -> Shape:
    """1 to 16 ranks, 1 to 4 stages per rank and 1 to 64 micro-batches, as far as the schedule exists for them."""
    stages = st.integers(1, 4) if "stages_per_rank" in entry.takes else st.just(entry.stages_per_rank)
    shape = st.builds(Shape, st.integers(1, 16), st.integers(1, 64), stages)
    return draw(shape.filter(lambda each: all(demand.is_met(each) for demand in entry.demands)))


def times() -> st.SearchStrategy[Times]:
    """Few whole ticks, so that what a formula demands of them is met now and then, and sums are exact."""
    ticks = st.integers(1, 4).map(float)
    return st.just(Times()) | st.builds(Times, ticks, ticks, ticks)


def made(entry: Entry, shape: Shape, **options) -> Schedule:
    p, m, v = shape
    return schedule(entry.name, num_ranks=p, num_microbatches=m, stages_per_rank=v, **options)


def timeline_of(schedule: Schedule, times: Times) -> Timeline:
    costs = Costs.uniform(
        schedule.num_stages,
        forward_s=times.forward_s,
        input_grad_s=times.input_grad_s,
        weight_grad_s=times.weight_grad_s,
    )
    return simulate(schedule, costs)


@every_schedule
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_verifies(entry, data):
    schedule = made(entry, data.draw(shapes_of(entry)))
    assert verify(schedule) == []


@every_schedule
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_verifies_with_transfers(entry, data):
    shape = data.draw(shapes_of(entry))
    small = shape._replace(num_microbatches=min(shape.num_microbatches, 2 * shape.num_ranks + 1))
    assert verify(add_transfers(made(entry, small))) == []


@every_schedule
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_idles_as_long_as_its_formulas_say(entry, data):
    shape, ticks = data.draw(shapes_of(entry)), data.draw(times())
    timeline = timeline_of(made(entry, shape), ticks)
    forwards_s = (2 if entry.name == "gpipe-recompute" else 1) * ticks.forward_s
    busy_s = shape.num_microbatches * shape.stages_per_rank * (forwards_s + ticks.backward_s)
    assert timeline.busy_s == (busy_s,) * shape.num_ranks
    bubble_s, unsynchronised_s = bubbles_s(entry, shape, ticks)
    assert bubble_s in (None, timeline.makespan_s - busy_s)
    assert unsynchronised_s in (None, timeline.longest_rank_span_s - busy_s)


def bubbles_s(entry: Entry, shape: Shape, ticks: Times) -> tuple[float | None, float | None]:
    formulas = (entry.formulas.bubble_s, entry.formulas.unsynchronised_bubble_s)
    first, second = (formula(shape, ticks) if formula else None for formula in formulas)
    return first, second


@every_schedule
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_holds_as_much_as_its_formulas_say(entry, data):
    shape = data.draw(shapes_of(entry))
    timeline = timeline_of(made(entry, shape), Times())
    for formula, peaks in (
        (entry.formulas.peak_held_to_input_grad, timeline.peak_held_to_input_grad),
        (entry.formulas.peak_held_to_weight_grad, timeline.peak_held_to_weight_grad),
    ):
        promised = formula(shape) if formula else None
        assert promised in (None, peaks)


@every_schedule
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_holds_as_many_versions_of_weights_as_its_formula_says(entry, data):
    shape = data.draw(shapes_of(entry))
    schedule, formula = made(entry, shape), entry.formulas.peak_versions_held
    own = tuple(len(schedule.placement.stages_of(rank)) for rank in range(shape.num_ranks))
    assert (formula is not None) == entry.is_asynchronous == bool(schedule.updates)
    assert (formula(shape) if formula else own) in (None, peak_versions_held(schedule))


WITHOUT = {"zb-1p": "bubble and peaks", "zb-2p": "bubble and peaks", "chimera": "peaks"}


@every_schedule
def test_formulas_hold_at_the_usual_shape(entry):
    """Those that give None everywhere would promise nothing."""
    shape = Shape(4, 16, entry.stages_per_rank)
    if entry.name == "hanayo":
        shape = shape._replace(num_microbatches=4)
    promised = [*bubbles_s(entry, shape, Times())]
    if entry.name == "chimera":
        promised = list(bubbles_s(entry, shape, Times(2.0, 1.0, 1.0)))
    promised += [f and f(shape) for f in entry.formulas[2:4]]
    has_bubble, has_peaks = promised[1] is not None, promised[2] is not None and promised[3] is not None
    without = WITHOUT.get(entry.name, "")
    assert (has_bubble, has_peaks) == ("bubble" not in without, "peaks" not in without)


@every_schedule
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_evaluation_keeps_the_forwards(entry, data):
    shape = data.draw(shapes_of(entry))
    whole, forwards = made(entry, shape), made(entry, shape, forward_only=True)
    kept = [[action for action in program if action.kind is Kind.FORWARD] for program in whole.programs]
    assert kept == list(map(list, forwards.programs))
    assert verify(forwards) == []


@every_schedule
@pytest.mark.parametrize("num_microbatches", [1, 5, 16])
def test_gradients_add_up_in_the_order_of_the_plain_loop(entry, num_microbatches):
    """Then bits are equal to it. Looped BFS runs them descending, and two replicas add up their own first."""
    schedule = made(entry, Shape(4, num_microbatches, entry.stages_per_rank))
    orders = {schedule.accumulation_order(stage) for stage in range(schedule.num_stages)}
    ascending = tuple(range(num_microbatches))
    assert orders == {ascending[::-1] if entry.name == "looped-bfs" else ascending}


@every_schedule
def test_backwards_are_split_as_the_paper_has_it(entry):
    schedule = made(entry, Shape(4, 8, entry.stages_per_rank))
    kinds = {action.kind for action in schedule}
    is_split, is_mixed = bool(kinds & HALVES), entry.name in ("dualpipe", "dualpipe-v")
    assert is_split == (is_mixed or "zb" in entry.name or entry.name in ("v-half", "v-min", "gis", "gis-h"))
    assert (Kind.BACKWARD in kinds) == (is_mixed or not is_split)
    assert bool(schedule.overlaps) == is_mixed
