"""Micro-batches in groups: the order in which interleaved schedules go through the stages of a rank.

A rank takes the micro-batches of a group through its first stage, then through its second, and so on; then comes
the next group. The backward takes the stages the other way round. The order is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeloom.errors import UnsupportedShape
from pipeloom.ir.counts import is_whole
from pipeloom.schedules.phases import Work
from pipeloom.schedules.shape import Shape


def group_sizes(shape: Shape, group_size: int | None) -> list[int]:
    """The sizes of the groups.

    Args:
        shape: of the schedule.
        group_size: micro-batches of a group, of which the last group has what is left; None: as many as there are
            ranks, and where that does not come out even, as evenly as it can be with no fewer.

    Raises:
        UnsupportedShape: ``group_size`` is no positive whole number.
    """
    m = shape.num_microbatches
    if group_size is None:
        num_groups = max(1, m // shape.num_ranks)
        return [m // num_groups + (i < m % num_groups) for i in range(num_groups)]
    if not is_whole(group_size) or group_size < 1:
        raise UnsupportedShape(f"group_size={group_size!r} was given; a whole number of at least 1 is needed")
    size = min(group_size, m)
    return [size] * (m // size) + [m % size] * (m % size > 0)


def in_groups(rank: int, shape: Shape, sizes: Sequence[int]) -> tuple[list[Work], list[Work]]:
    """What F, and what B, is done for on a rank, in order."""
    stages = range(rank, shape.num_ranks * shape.stages_per_rank, shape.num_ranks)
    return list(_through(stages, sizes)), list(_through(stages[::-1], sizes))


def _through(stages: range, sizes: Sequence[int]) -> Iterator[Work]:
    first = 0
    for size in sizes:
        for stage in stages:
            for microbatch in range(first, first + size):
                yield stage, microbatch
        first += size


def num_warmup(rank: int, shape: Shape, sizes: Sequence[int], per_hop: int) -> int:
    """Forwards before the first pair: a group through all stages but the last, and some for each rank behind.

    Rank 0 must not wait for a micro-batch that the last rank forwards only after a backward that waits for rank 0.
    So no rank runs further ahead than the two groups that meet in the steady phase are long; with groups of as many
    as there are ranks that is no limit.

    Args:
        rank: whose.
        shape: of the schedule.
        sizes: of the groups.
        per_hop: forwards per rank behind: 1, or 2 to hide the transfers of whole backwards.
    """
    limit = min(a + b for a, b in zip(sizes, sizes[1:] or sizes, strict=False))
    ahead = min(per_hop * (shape.num_ranks - 1 - rank), limit)
    return min(ahead + (shape.stages_per_rank - 1) * sizes[0], shape.num_microbatches * shape.stages_per_rank)
