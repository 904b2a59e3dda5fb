"""A timeline in a few lines of words."""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir import Schedule, Timeline

_MOST_LISTED = 8


def describe(timeline: Timeline) -> Iterator[str]:
    """Lines on a timeline: how idle it is; for training also what it holds and in which order it adds up."""
    yield f"Idle fraction: {timeline.bubble_fraction:.0%}"
    if timeline.schedule.is_forward_only:
        return
    yield f"Held until the input gradient, at most: {_per_rank(timeline.peak_held_to_input_grad)}"
    yield f"Held until the weight gradient, at most: {_per_rank(timeline.peak_held_to_weight_grad)}"
    if timeline.schedule.updates:
        updates = _listed(timeline.schedule.updates)
        versions = " ".join(map(str, timeline.peak_versions_held))
        yield f"Weights are updated after the last backward of micro-batches {updates}"
        yield f"Versions of weights held, at most: {versions}, by GPU"
    yield from _accumulation(timeline.schedule)


def _per_rank(counts: tuple[int, ...]) -> str:
    return " ".join(map(str, counts)) + " micro-batches, by GPU"


def _listed(numbers: tuple[int, ...]) -> str:
    """All of them if they are few."""
    return " ".join(map(str, numbers if len(numbers) <= _MOST_LISTED else (*numbers[:_MOST_LISTED], "…")))


def _accumulation(schedule: Schedule) -> Iterator[str]:
    """Gradients are sums of floats, so their bits depend on this order."""
    stages_of: dict[tuple[int, ...], list[int]] = {}
    for stage in range(schedule.num_stages):
        stages_of.setdefault(schedule.accumulation_order(stage), []).append(stage)
    for order, stages in stages_of.items():
        which = "" if len(stages_of) == 1 else f" of stage {' '.join(map(str, stages))}"
        is_ascending = order == tuple(sorted(order))
        text = "ascending micro-batches" if is_ascending else f"micro-batches {' '.join(map(str, order))}"
        yield f"Gradients{which} add up in the order: {text}"
