"""ZB-H1 (Qi et al., ICLR 2024, section 2.3): 1F1B with a split backward, whose W fill the waits.

Bubble ``(p−1)(T_F+T_I−T_W)`` for p ranks, m ≥ p micro-batches, equal stages and T_W no longer than T_F or T_I; the
paper calls our I "B". Rank r holds ``p−r`` micro-batches until I and W follow r micro-batches later, so until W it
holds p: with M_B held until I and M_W until W that is ``(p−r)M_B + r·M_W``, never more than 1F1B's first rank. Any
number of micro-batches. 4 ranks × 8 micro-batches::

    GPU 0: F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
    GPU 1:  . F0 F1 F2  .  . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
    GPU 2:  .  . F0 F1  . I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
    GPU 3:  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
"""

from __future__ import annotations

from pipeloom.ir import Placement, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks, Times
from pipeloom.schedules.phases import one_forward_one_input_grad
from pipeloom.schedules.shape import ONE_STAGE, Shape, require


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """The order of 1F1B with I for B; on rank r the W of a micro-batch stands r micro-batches later.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
    """
    require("zb-h1", Shape(num_ranks, num_microbatches))
    programs = []
    for rank in range(num_ranks):
        works = [(rank, i) for i in range(num_microbatches)]
        num_warmup = min(num_ranks - 1 - rank, num_microbatches)
        programs.append(tuple(one_forward_one_input_grad(works, works, num_warmup, lag=rank)))
    return Schedule(Placement.single(num_ranks), tuple(programs), num_microbatches, name="zb-h1")


def bubble_s(shape: Shape, times: Times) -> float | None:
    """``(p−1)(T_F+T_I−T_W)``."""
    p, m, _ = shape
    holds = m >= p and times.weight_grad_s <= min(times.forward_s, times.input_grad_s)
    return (p - 1) * (times.forward_s + times.input_grad_s - times.weight_grad_s) if holds else None


def peak_held_to_input_grad(shape: Shape) -> Peaks:
    """That of 1F1B."""
    p, m, _ = shape
    return tuple(min(p - rank, m) for rank in range(p))


def peak_held_to_weight_grad(shape: Shape) -> Peaks:
    """r more, by which W lags."""
    p, m, _ = shape
    return (min(p, m),) * p


ENTRY = Entry(
    "zb-h1",
    zb_h1,
    Formulas(bubble_s, bubble_s, peak_held_to_input_grad, peak_held_to_weight_grad),
    demands=(ONE_STAGE,),
    aliases=("zero-bubble", "zero-bubble-h1"),
)
