"""GPipe (Huang et al., NeurIPS 2019, section 2.3): all forwards, then all backwards.

Bubble ``(p−1)(T_F+T_B)``, fraction ``(p−1)/(m+p−1)``, for p ranks, m micro-batches and equal stages; every rank holds
all m micro-batches. The paper's figure runs the backwards descending; like torch we run them ascending, so that
gradients add up in the order of a plain loop. 4 ranks × 8 micro-batches::

    GPU 0: F0 F1 F2 F3 F4 F5 F6 F7  .  .  .  .  .  .  .  .  . B0--- B1--- B2--- B3--- B4--- B5--- B6--- B7---
    GPU 1:  . F0 F1 F2 F3 F4 F5 F6 F7  .  .  .  .  .  . B0--- B1--- B2--- B3--- B4--- B5--- B6--- B7---  .  .
    GPU 2:  .  . F0 F1 F2 F3 F4 F5 F6 F7  .  .  . B0--- B1--- B2--- B3--- B4--- B5--- B6--- B7---  .  .  .  .
    GPU 3:  .  .  . F0 F1 F2 F3 F4 F5 F6 F7 B0--- B1--- B2--- B3--- B4--- B5--- B6--- B7---  .  .  .  .  .  .
"""

from __future__ import annotations

from pipeloom.ir import Action, Kind, Placement, Program, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks
from pipeloom.schedules.one_f_one_b import bubble_s
from pipeloom.schedules.shape import ONE_STAGE, Shape, require


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, one stage per rank.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
    """
    require("gpipe", Shape(num_ranks, num_microbatches))
    programs = tuple(_program(rank, num_microbatches) for rank in range(num_ranks))
    return Schedule(Placement.single(num_ranks), programs, num_microbatches, name="gpipe")


def _program(rank: int, num_microbatches: int) -> Program:
    forwards = tuple(Action(Kind.FORWARD, rank, i) for i in range(num_microbatches))
    backwards = tuple(Action(Kind.BACKWARD, rank, i) for i in range(num_microbatches))
    return forwards + backwards


def peak_held(shape: Shape) -> Peaks:
    """All."""
    return (shape.num_microbatches,) * shape.num_ranks


ENTRY = Entry(
    "gpipe",
    gpipe,
    Formulas(bubble_s, bubble_s, peak_held, peak_held),
    demands=(ONE_STAGE,),
)
