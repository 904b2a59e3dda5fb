"""Schedules that no generator would make, but that run: random placements, halves, recomputation and orders."""

from collections.abc import Iterable

from hypothesis import strategies as st

from pipeloom.cost import Costs
from pipeloom.ir import Action, Kind, Links, Placement, Schedule
from pipeloom.ir.relations import waits_for

F, B, I, W, R = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE  # noqa: E741

shapes = {"num_ranks": st.integers(1, 16), "num_microbatches": st.integers(1, 64)}
"""The shapes over which every generator keeps its promises."""


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """One to three ranks with one or two stages each, in any order."""
    num_ranks = draw(st.integers(1, 3))
    stages = list(range(num_ranks)) * draw(st.integers(1, 2))
    return Placement.of(draw(st.permutations(stages)))


@st.composite
def links_of(draw: st.DrawFn, num_stages: int) -> Links:
    """Any pairs of stages that are no neighbours, forward and, apart from those, backward."""
    pairs = [(first, later) for later in range(num_stages) for first in range(later - 1)]
    some = st.sets(st.sampled_from(pairs)) if pairs else st.just(set())
    return Links(tuple(draw(some)), tuple((later, first) for first, later in draw(some)))


@st.composite
def runnable_schedules(draw: st.DrawFn, *, has_links: bool = False, has_replicas: bool = False) -> Schedule:
    """A schedule whose order is one in which everything could happen, one after another."""
    placement = draw(placements())
    if has_replicas:
        placement = Placement(placement.ranks, tuple(draw(st.permutations(placement.ranks))))
    links = draw(links_of(placement.num_stages)) if has_links else Links()
    num_microbatches = draw(st.integers(1, 4))
    due = [
        Action(kind, stage, microbatch)
        for stage in range(placement.num_stages)
        for microbatch in range(num_microbatches)
        for kind in draw(st.sampled_from([(F, B), (F, I, W), (F, R, B), (F, R, I, W)]))
    ]
    empty = Schedule(placement, ((),) * placement.num_ranks, num_microbatches, links=links)
    made = empty.with_programs([a for a in due if empty.holds(r, a)] for r in range(empty.num_ranks))
    order = list(_any_order(draw, due, made))
    return made.with_programs([a for a in order if made.holds(r, a)] for r in range(made.num_ranks))


def _any_order(draw: st.DrawFn, due: list[Action], schedule: Schedule) -> Iterable[Action]:
    before = {action: set(waits_for(action, schedule)) for action in due}
    done: set[Action] = set()
    while len(done) < len(due):
        ready = [a for a in due if a not in done and done >= before[a]]
        chosen = draw(st.sampled_from(ready))
        done.add(chosen)
        yield chosen


@st.composite
def costs_for(draw: st.DrawFn, num_stages: int) -> Costs:
    """Costs in whole ticks, so that sums are exact, with a bandwidth or without."""
    ticks = st.integers(0, 5).map(float)
    each = st.lists(ticks, min_size=num_stages, max_size=num_stages)
    sizes = st.lists(st.integers(0, 7), min_size=num_stages - 1, max_size=num_stages - 1)
    bandwidth = draw(st.none() | st.just(0.5))
    return Costs.uniform(
        num_stages,
        forward_s=draw(each),
        input_grad_s=draw(each),
        weight_grad_s=draw(each),
        transfer_s=draw(ticks),
        transfer_bytes_per_s=bandwidth,
        boundary_bytes=draw(sizes) if bandwidth else (),
    )


@st.composite
def schedules_and_costs(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """Both, for the same number of stages."""
    made = draw(runnable_schedules(has_links=draw(st.booleans())))
    return made, draw(costs_for(made.num_stages))
