"""1F1B (PipeDream-Flush, Narayanan et al., ICML 2021, section 2.2; DAPPLE, Fan et al., PPoPP 2021).

The bubble of GPipe, ``(p−1)(T_F+T_B)``, for p ranks and equal stages, but rank r holds only ``p−r`` micro-batches
(fewer where there are fewer), however many there are. Any number of micro-batches. 4 ranks × 8 micro-batches::

    GPU 0: F0 F1 F2 F3  .  .  .  .  .  . B0--- F4 B1--- F5 B2--- F6 B3--- F7 B4---  . B5---  . B6---  . B7---
    GPU 1:  . F0 F1 F2  .  .  .  . B0--- F3 B1--- F4 B2--- F5 B3--- F6 B4--- F7 B5---  . B6---  . B7---  .  .
    GPU 2:  .  . F0 F1  .  . B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6---  . B7---  .  .  .  .
    GPU 3:  .  .  . F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6--- F7 B7---  .  .  .  .  .  .
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir import Action, Kind, Placement, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks, Times
from pipeloom.schedules.shape import ONE_STAGE, Shape, require


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Forwards until the pipeline is full, then one forward and one backward in turn, then the backwards left.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
    """
    require("1f1b", Shape(num_ranks, num_microbatches))
    programs = tuple(tuple(_program(rank, num_ranks, num_microbatches)) for rank in range(num_ranks))
    return Schedule(Placement.single(num_ranks), programs, num_microbatches, name="1f1b")


def _program(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    num_warmup = min(num_ranks - 1 - rank, num_microbatches)
    for i in range(num_warmup):
        yield Action(Kind.FORWARD, rank, i)
    for i in range(num_microbatches - num_warmup):
        yield Action(Kind.FORWARD, rank, num_warmup + i)
        yield Action(Kind.BACKWARD, rank, i)
    for i in range(num_microbatches - num_warmup, num_microbatches):
        yield Action(Kind.BACKWARD, rank, i)


def bubble_s(shape: Shape, times: Times) -> float:
    """``(p−1)(T_F+T_B)``."""
    return (shape.num_ranks - 1) * times.step_s


def peak_held(shape: Shape) -> Peaks:
    """One for each rank from r on."""
    p, m, _ = shape
    return tuple(min(p - rank, m) for rank in range(p))


ENTRY = Entry(
    "1f1b",
    one_f_one_b,
    Formulas(bubble_s, bubble_s, peak_held, peak_held),
    demands=(ONE_STAGE,),
    aliases=("pipedream-flush", "dapple", "one-f-one-b"),
)
