"""PipeDream-2BW (Narayanan et al., ICML 2021, section 3.1): two versions of the weights, and gradient accumulation.

A batch is m ≥ p micro-batches, and an update follows its last backward. Every micro-batch of batch t, counted from 1,
uses on every stage the weights after update t−2 (those at the start for the first two), so the rule has a delay of
one step::

    W(t+1) = W(t) − ν·∇f(W(t−1))

Two versions are enough: as m ≥ p, the weights that batch t+1 uses are there when its first micro-batch comes in, and
nobody uses older ones than batch t. The bubble is ``(p−1)(T_F+T_B)`` once, however many batches there are; activations
are those of 1F1B, ``p−r``. A last batch may be smaller. 4 ranks × 2 batches of 4 micro-batches, with an update at
the end of B3 and of B7::

    GPU 0: F0 F1 F2 F3  .  .  .  .  .  . B0--- F4 B1--- F5 B2--- F6 B3--- F7 B4---  . B5---  . B6---  . B7---
    GPU 1:  . F0 F1 F2  .  .  .  . B0--- F3 B1--- F4 B2--- F5 B3--- F6 B4--- F7 B5---  . B6---  . B7---  .  .
    GPU 2:  .  . F0 F1  .  . B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6---  . B7---  .  .  .  .
    GPU 3:  .  .  . F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6--- F7 B7---  .  .  .  .  .  .
"""

from __future__ import annotations

from dataclasses import replace

from pipeloom.errors import UnsupportedShape
from pipeloom.ir import Action, Kind, Pin, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks
from pipeloom.schedules.one_f_one_b import bubble_s, peak_held
from pipeloom.schedules.shape import ONE_STAGE, Shape
from pipeloom.schedules.updating import updating


def pipedream_2bw(num_ranks: int, num_microbatches: int, microbatches_per_update: int | None = None) -> Schedule:
    """1F1B with an update after every batch; each forward is pinned to the version before the batch before.

    Args:
        num_ranks: p.
        num_microbatches: of all batches together.
        microbatches_per_update: m of the paper, at least p; None: p.

    Raises:
        UnsupportedShape: there is no rank or micro-batch, or a batch has fewer micro-batches than there are ranks.
    """
    size = num_ranks if microbatches_per_update is None else microbatches_per_update
    made = updating("pipedream-2bw", num_ranks, num_microbatches, size)
    if size < num_ranks:
        raise UnsupportedShape(
            f"schedule 'pipedream-2bw' was asked for with {size} micro-batches in a batch on {num_ranks} ranks; at "
            "least as many as ranks are needed: with fewer, two versions of the weights are not enough",
            f"cut a batch into {num_ranks} micro-batches or more, or take 'pipedream'",
        )
    pins = (
        Pin(Action(Kind.FORWARD, stage, i), max(0, i // size - 1))
        for stage in range(num_ranks)
        for i in range(num_microbatches)
    )
    return replace(made, pins=frozenset(pins))


def peak_versions(shape: Shape) -> Peaks:
    """Two, unless there is only one batch of p micro-batches."""
    p, m, _ = shape
    return (1 + (m > p),) * p


ENTRY = Entry(
    "pipedream-2bw",
    pipedream_2bw,
    Formulas(bubble_s, bubble_s, peak_held, peak_held, peak_versions),
    takes=frozenset({"microbatches_per_update"}),
    demands=(ONE_STAGE,),
    aliases=("2bw", "double-buffered-weights"),
)
