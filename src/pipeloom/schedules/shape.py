"""The counts of a schedule, and what a schedule demands of them.

A demand is a predicate, so the shapes that an error names as near are found by trying them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pipeloom.errors import UnsupportedShape

_MOST_NAMED = 3
_FARTHEST = 64


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Shape(NamedTuple):
    """How many there are of each.

    Attributes:
        num_ranks: p in the papers.
        num_microbatches: m in the papers.
        stages_per_rank: v in the papers.
    """

    num_ranks: int
    num_microbatches: int
    stages_per_rank: int = 1

    def __str__(self) -> str:
        return f"{_counted(self.num_ranks, 'rank')} × {_counted(self.stages_per_rank, 'stage')} per rank"


class Demand(NamedTuple):
    """What a schedule demands.

    Attributes:
        is_met: whether a shape meets it.
        text: what is demanded: "it holds exactly 2 stages on each rank".
        reason: why: "one goes down the V and one comes up".
    """

    is_met: Callable[[Shape], bool]
    text: str
    reason: str


def stages_on_each_rank(count: int, reason: str) -> Demand:
    """The schedule is for exactly ``count`` stages per rank."""
    text = f"it holds exactly {_counted(count, 'stage')} on each"
    return Demand(lambda shape: shape.stages_per_rank == count, text, reason)


ONE_STAGE = stages_on_each_rank(1, "several stages on a rank need an order of their own (interleaved, looped-bfs)")
IN_A_V = stages_on_each_rank(2, "one on the way down the V, one on the way up")


def require(name: str, shape: Shape, *demands: Demand) -> None:
    """Check that a schedule exists for a shape.

    Raises:
        UnsupportedShape: there is no rank, stage or micro-batch, or a demand is not met; the nearest shapes that
            meet all are named.
    """
    for counted, count in zip(("ranks", "micro-batches", "stages per rank"), shape, strict=True):
        if count < 1:
            raise UnsupportedShape(f"{count} {counted} were given; at least 1 is needed")
    for demand in demands:
        if not demand.is_met(shape):
            near = " or ".join(map(str, nearest(shape, *demands)))
            raise UnsupportedShape(
                f"schedule {name!r} was asked for with {shape}; {demand.text}: {demand.reason}",
                f"the nearest shapes that fit: {near}" if near else None,
            )


def nearest(shape: Shape, *demands: Demand) -> list[Shape]:
    """The shapes that meet all demands with the fewest ranks and stages per rank more or less."""
    for distance in range(1, _FARTHEST):
        found = [near for near in _around(shape, distance) if all(demand.is_met(near) for demand in demands)]
        if found:
            return found[:_MOST_NAMED]
    return []


def _around(shape: Shape, distance: int) -> Iterator[Shape]:
    """Shapes so many ranks and stages per rank away: those with the same ranks first."""
    for ranks_away in range(distance + 1):
        for num_ranks in sorted({shape.num_ranks - ranks_away, shape.num_ranks + ranks_away}):
            stages_away = distance - ranks_away
            for stages in sorted({shape.stages_per_rank - stages_away, shape.stages_per_rank + stages_away}):
                if num_ranks > 0 and stages > 0:
                    yield shape._replace(num_ranks=num_ranks, stages_per_rank=stages)
