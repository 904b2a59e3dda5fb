"""PipeDream (Narayanan et al., SOSP 2019, sections 3.2 and 3.3): no flush, and each stage stashes its weights.

A mini-batch is one micro-batch here, and an update follows every backward. A forward uses the newest weights of its
stage; the backward uses the same ones again, so rank r of p keeps ``p−r`` versions. With n stages, a learning rate ν
and w_k of stage k, the update rule is (section 3.3)::

    w(t+1) = w(t) − ν·∇f(w_1(t−n+1), w_2(t−n+2), …, w_n(t))

The bubble is ``(p−1)(T_F+T_B)`` once, however many mini-batches there are; activations are those of 1F1B, ``p−r``.
Any number of mini-batches. GPU 3 of 4 begins F0 B0 U0 F1 B1 U1, so its F1 sees the first update; GPU 0 begins F0 F1
F2 F3 B0 U0 F4, so there F4 is the first to see one. 4 ranks × 8 mini-batches, with an update at the end of each B::

    GPU 0: F0 F1 F2 F3  .  .  .  .  .  . B0--- F4 B1--- F5 B2--- F6 B3--- F7 B4---  . B5---  . B6---  . B7---
    GPU 1:  . F0 F1 F2  .  .  .  . B0--- F3 B1--- F4 B2--- F5 B3--- F6 B4--- F7 B5---  . B6---  . B7---  .  .
    GPU 2:  .  . F0 F1  .  . B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6---  . B7---  .  .  .  .
    GPU 3:  .  .  . F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6--- F7 B7---  .  .  .  .  .  .
"""

from __future__ import annotations

from pipeloom.ir import Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks
from pipeloom.schedules.one_f_one_b import bubble_s, peak_held
from pipeloom.schedules.shape import ONE_STAGE, Shape
from pipeloom.schedules.updating import updating


def pipedream(num_ranks: int, num_microbatches: int, microbatches_per_update: int = 1) -> Schedule:
    """1F1B with an update after every backward; each forward uses the newest weights of its stage.

    Args:
        num_ranks: p.
        num_microbatches: of all mini-batches together.
        microbatches_per_update: how many micro-batches a mini-batch is; the paper has 1.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
    """
    return updating("pipedream", num_ranks, num_microbatches, microbatches_per_update)


def peak_versions(shape: Shape) -> Peaks | None:
    """As many as micro-batches are on their way at once, ``p−r``, once the pipeline is full of updated ones."""
    p, m, _ = shape
    return tuple(p - rank for rank in range(p)) if m >= 2 * p - 1 else None


ENTRY = Entry(
    "pipedream",
    pipedream,
    Formulas(bubble_s, bubble_s, peak_held, peak_held, peak_versions),
    takes=frozenset({"microbatches_per_update"}),
    demands=(ONE_STAGE,),
    aliases=("weight-stashing",),
    microbatches_per_batch=1,
)
