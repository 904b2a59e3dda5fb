"""Eager 1F1B (Zhuang et al., MLSys 2023): 1F1B with twice the forwards before the first backward.

Bubble ``(p−1)(T_F+T_B)`` for p ranks and equal stages as in 1F1B; but a value has one slot to travel before it is
needed, so transfers of up to one slot cost nothing. Rank r holds ``2(p−1−r)+1`` micro-batches (fewer where there are
fewer). Any number of micro-batches. 4 ranks × 8 micro-batches::

    GPU 0: F0 F1 F2 F3 F4 F5 F6  .  .  . B0--- F7 B1---  . B2---  . B3---  . B4---  . B5---  . B6---  . B7---
    GPU 1:  . F0 F1 F2 F3 F4  .  . B0--- F5 B1--- F6 B2--- F7 B3---  . B4---  . B5---  . B6---  . B7---  .  .
    GPU 2:  .  . F0 F1 F2  . B0--- F3 B1--- F4 B2--- F5 B3--- F6 B4--- F7 B5---  . B6---  . B7---  .  .  .  .
    GPU 3:  .  .  . F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6--- F7 B7---  .  .  .  .  .  .
"""

from __future__ import annotations

from pipeloom.ir import Placement, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks
from pipeloom.schedules.one_f_one_b import bubble_s
from pipeloom.schedules.phases import one_forward_one_backward
from pipeloom.schedules.shape import ONE_STAGE, Shape, require


def eager_one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two forwards for each rank behind, then one forward and one backward in turn, then the backwards left.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
    """
    require("eager-1f1b", Shape(num_ranks, num_microbatches))
    programs = []
    for rank in range(num_ranks):
        works = [(rank, i) for i in range(num_microbatches)]
        num_warmup = min(2 * (num_ranks - 1 - rank), num_microbatches)
        programs.append(tuple(one_forward_one_backward(works, works, num_warmup)))
    return Schedule(Placement.single(num_ranks), tuple(programs), num_microbatches, name="eager-1f1b")


def peak_held(shape: Shape) -> Peaks:
    """The forwards before the first backward."""
    p, m, _ = shape
    return tuple(min(2 * (p - 1 - rank) + 1, m) for rank in range(p))


ENTRY = Entry(
    "eager-1f1b",
    eager_one_f_one_b,
    Formulas(bubble_s, bubble_s, peak_held, peak_held),
    demands=(ONE_STAGE,),
    aliases=("eager-one-f-one-b",),
)
