"""GPipe as in its paper (Huang et al., NeurIPS 2019, section 2.3): between forward and backward a stage keeps its input.

R runs the forward again right before each backward. It needs no gradient, so that of the first micro-batch runs while
its rank waits for one: the bubble is GPipe's, ``(p−1)(T_F+T_B)``, and not ``(p−1)(2T_F+T_B)`` as with the second
forward inside B. Its fraction is ``(p−1)(T_F+T_B) / (m(2T_F+T_B) + (p−1)(T_F+T_B))``. A rank holds m inputs of its
stage and the activations of one micro-batch: O(N + L/K · N/M) in the paper, for N samples, L layers, K ranks and M
micro-batches. 4 ranks × 8 micro-batches::

    GPU 0: F0 F1 F2 F3 F4 F5 F6 F7 R0  .  .  .  .  .  .  .  .  . B0--- R1 B1--- R2 B2--- R3 B3--- R4 B4--- R5 B5--- R6 B6--- R7 B7---
    GPU 1:  . F0 F1 F2 F3 F4 F5 F6 F7 R0  .  .  .  .  .  . B0--- R1 B1--- R2 B2--- R3 B3--- R4 B4--- R5 B5--- R6 B6--- R7 B7---  .  .
    GPU 2:  .  . F0 F1 F2 F3 F4 F5 F6 F7 R0  .  .  . B0--- R1 B1--- R2 B2--- R3 B3--- R4 B4--- R5 B5--- R6 B6--- R7 B7---  .  .  .  .
    GPU 3:  .  .  . F0 F1 F2 F3 F4 F5 F6 F7 R0 B0--- R1 B1--- R2 B2--- R3 B3--- R4 B4--- R5 B5--- R6 B6--- R7 B7---  .  .  .  .  .  .
"""  # noqa: E501  # a drawing is as wide as it is

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir import Action, Kind, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas
from pipeloom.schedules.gpipe import gpipe, peak_held
from pipeloom.schedules.one_f_one_b import bubble_s
from pipeloom.schedules.shape import ONE_STAGE


def gpipe_recompute(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, each after a second forward of its micro-batch; one stage per rank.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
    """
    made = gpipe(num_ranks, num_microbatches)
    programs = [[each for action in program for each in _with_recompute(action)] for program in made.programs]
    return replace(made.with_programs(programs), name="gpipe-recompute")


def _with_recompute(action: Action) -> tuple[Action, ...]:
    again = Action(Kind.RECOMPUTE, action.stage, action.microbatch)
    return (again, action) if action.kind is Kind.BACKWARD else (action,)


ENTRY = Entry(
    "gpipe-recompute",
    gpipe_recompute,
    Formulas(bubble_s, bubble_s, peak_held, peak_held),
    demands=(ONE_STAGE,),
    has_recompute=True,
)
