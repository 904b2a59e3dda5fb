"""Chimera (Li and Hoefler, SC 2021, section 3.1): two pipelines in opposite directions through the same ranks.

Each rank holds a stage of either, so the weights twice; their gradients are summed once a step. The first half of the
micro-batches goes down (stage s on rank s), the other half up (stage s on rank p−1−s). A block of p micro-batches,
p/2 each way, fills slots that never collide for an even p; blocks follow one another ("direct concatenation"). Bubble
``(p−2)T_B`` at T_F = T_B for an m that is a multiple of p, fraction ``(p−2)/(2m+p−2)``; at T_B = 2T_F the same for m
= p, fraction ``(p−2)/(1.5m+p−2)``, and more between the blocks of a larger m. A rank holds p/2+1 to p micro-batches.
Where m is no multiple of p, those of the last block that are not there are left out. 4 ranks × 8 micro-batches, of
which 4 to 7 go up::

    GPU 0: F0 F1  . F4 B4--- F5 B5---  . B0--- F2  . B1--- F3 F6 B6--- F7 B7---  . B2---  .  . B3---
    GPU 1:  . F0 F4 F1 F5  . B4--- B0--- B5--- B1--- F2 F6  . F3 F7  . B6--- B2--- B7--- B3---  .  .
    GPU 2:  . F4 F0 F5 F1  . B0--- B4--- B1--- B5--- F6 F2  . F7 F3  . B2--- B6--- B3--- B7---  .  .
    GPU 3: F4 F5  . F0 B0--- F1 B1---  . B4--- F6  . B5--- F7 F2 B2--- F3 B3---  . B6---  .  . B7---
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir import Placement, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Times
from pipeloom.schedules.shape import Demand, Shape, require, stages_on_each_rank
from pipeloom.schedules.slots import Slot, in_order_of_slots

DEMANDS = (
    stages_on_each_rank(1, "of each of two copies of the model, which run in opposite directions"),
    Demand(
        lambda shape: shape.num_ranks % 2 == 0,
        "it needs an even number of ranks",
        "the two directions meet between two ranks",
    ),
)


def chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    """Blocks of as many micro-batches as there are ranks, half of them each way.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch, or an odd number of ranks.
    """
    require("chimera", Shape(num_ranks, num_microbatches), *DEMANDS)
    half = -(-num_microbatches // 2)
    down, up = range(half), range(half, num_microbatches)
    programs = []
    for rank in range(num_ranks):
        forwards = [*_forwards(rank, down, num_ranks), *_forwards(num_ranks - 1 - rank, up, num_ranks)]
        backwards = [*_backwards(rank, down, num_ranks), *_backwards(num_ranks - 1 - rank, up, num_ranks)]
        programs.append(in_order_of_slots(forwards, backwards))
    return Schedule(Placement.bidirectional(num_ranks), tuple(programs), num_microbatches, name="chimera")


def _forwards(stage: int, microbatches: range, num_ranks: int) -> Iterator[Slot]:
    for i, enter in zip(microbatches, _enters(num_ranks), strict=False):
        yield enter + stage, stage, i


def _backwards(stage: int, microbatches: range, num_ranks: int) -> Iterator[Slot]:
    for i, enter in zip(microbatches, _enters(num_ranks), strict=False):
        yield enter + 2 * num_ranks - 1 - stage, stage, i


def _enters(num_ranks: int) -> Iterator[int]:
    """The slots in which micro-batches of one direction enter: half a block two slots apart, then the next block."""
    first = 0
    while True:
        yield from range(first, first + num_ranks, 2)
        first += 2 * num_ranks


def bubble_s(shape: Shape, times: Times) -> float | None:
    """``(p−2)T_B`` at T_F = T_B, and for one block at T_B = 2T_F."""
    p, m, _ = shape
    ratio = times.backward_s / times.forward_s
    holds = (ratio == 1 and m % p == 0) or (ratio == 2 and m == p)
    return (p - 2) * times.backward_s if holds else None


ENTRY = Entry(
    "chimera",
    chimera,
    Formulas(bubble_s, bubble_s),
    demands=DEMANDS,
)
