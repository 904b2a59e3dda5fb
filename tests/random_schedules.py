"""Schedules that no generator would make, but that run: random placements, halves, recomputation and orders."""

from collections.abc import Iterable

from hypothesis import strategies as st

from pipeloom.cost import Costs
from pipeloom.ir import Action, Kind, Placement, Schedule
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
def runnable_schedules(draw: st.DrawFn) -> Schedule:
    """A schedule whose order is one in which everything could happen, one after another."""
    placement = draw(placements())
    num_microbatches = draw(st.integers(1, 4))
    due = [
        Action(kind, stage, microbatch)
        for stage in range(placement.num_stages)
        for microbatch in range(num_microbatches)
        for kind in draw(st.sampled_from([(F, B), (F, I, W), (F, R, B), (F, R, I, W)]))
    ]
    programs: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for action in _any_order(draw, due, placement.num_stages):
        programs[placement.rank_of(action.stage)].append(action)
    return Schedule(placement, tuple(map(tuple, programs)), num_microbatches)


def _any_order(draw: st.DrawFn, due: list[Action], num_stages: int) -> Iterable[Action]:
    held, done = frozenset(due), set()
    while len(done) < len(due):
        ready = [a for a in due if a not in done and done.issuperset(waits_for(a, num_stages, held))]
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
    made = draw(runnable_schedules())
    return made, draw(costs_for(made.num_stages))
