"""ZB-H2 (Qi et al., ICLR 2024, section 2.3): ZB-H1 with twice the forwards before the first I.

No bubble at equal times of F, I and W, as the paper counts: by the longest rank span, of which
``(p−1)(T_F+T_I−2T_W)`` are idle for p ranks, m ≥ 2p−1 micro-batches and T_W no longer than T_F or T_I. It needs steps
without a barrier between them; in the makespan rank p−1 begins ``(p−1)T_F`` late. Rank r holds ``2(p−r)−1``
micro-batches until I and ``2p−1`` until W. Fewer micro-batches make a shorter warm-up, and a bubble. 4 ranks × 8
micro-batches::

    GPU 0: F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7  .  .  .
    GPU 1:  . F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7  .  .
    GPU 2:  .  . F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7  .
    GPU 3:  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7
"""

from __future__ import annotations

from pipeloom.ir import Placement, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks, Times
from pipeloom.schedules.phases import one_forward_one_input_grad
from pipeloom.schedules.shape import ONE_STAGE, Shape, require


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two forwards for each rank behind, then F, I and W in turn; on rank r, W lags 2r micro-batches.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
    """
    require("zb-h2", Shape(num_ranks, num_microbatches))
    programs = []
    for rank in range(num_ranks):
        works = [(rank, i) for i in range(num_microbatches)]
        num_warmup = min(2 * (num_ranks - 1 - rank), num_microbatches)
        programs.append(tuple(one_forward_one_input_grad(works, works, num_warmup, lag=2 * rank)))
    return Schedule(Placement.single(num_ranks), tuple(programs), num_microbatches, name="zb-h2")


def unsynchronised_bubble_s(shape: Shape, times: Times) -> float | None:
    """``(p−1)(T_F+T_I−2T_W)``."""
    p, m, _ = shape
    holds = m >= 2 * p - 1 and times.weight_grad_s <= min(times.forward_s, times.input_grad_s)
    return (p - 1) * (times.forward_s + times.input_grad_s - 2 * times.weight_grad_s) if holds else None


def peak_held_to_input_grad(shape: Shape) -> Peaks:
    """The forwards before the first I."""
    p, m, _ = shape
    return tuple(min(2 * (p - rank) - 1, m) for rank in range(p))


def peak_held_to_weight_grad(shape: Shape) -> Peaks:
    """2r more, by which W lags."""
    p, m, _ = shape
    return (min(2 * p - 1, m),) * p


ENTRY = Entry(
    "zb-h2",
    zb_h2,
    Formulas(None, unsynchronised_bubble_s, peak_held_to_input_grad, peak_held_to_weight_grad),
    demands=(ONE_STAGE,),
    aliases=("zero-bubble-h2",),
)
