"""PipeDream with vertical sync (Narayanan et al., SOSP 2019, section 3.3): one version for a mini-batch on all stages.

As `pipedream`, but a mini-batch uses on every stage the version that was the newest on stage 0 when it came in, so
its gradient is that of one model that existed, n−1 updates ago::

    w(t+1) = w(t) − ν·∇f(w_1(t−n+1), w_2(t−n+1), …, w_n(t−n+1))

For this every rank keeps p versions. Bubble and activations are those of `pipedream`. With versions, GPU 3 of 4 runs
F0@0 B0 U0 F1@0 B1 U1 F2@0 B2 U2 F3@0 B3 U3 F4@1, as GPU 0 has F4 right after U0. 4 ranks × 8 mini-batches, with an
update at the end of each B::

    GPU 0: F0 F1 F2 F3  .  .  .  .  .  . B0--- F4 B1--- F5 B2--- F6 B3--- F7 B4---  . B5---  . B6---  . B7---
    GPU 1:  . F0 F1 F2  .  .  .  . B0--- F3 B1--- F4 B2--- F5 B3--- F6 B4--- F7 B5---  . B6---  . B7---  .  .
    GPU 2:  .  . F0 F1  .  . B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6---  . B7---  .  .  .  .
    GPU 3:  .  .  . F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6--- F7 B7---  .  .  .  .  .  .
"""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir import Action, Kind, Pin, Schedule
from pipeloom.ir.versions import used_versions
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks
from pipeloom.schedules.one_f_one_b import bubble_s, peak_held
from pipeloom.schedules.shape import ONE_STAGE, Shape
from pipeloom.schedules.updating import updating


def pipedream_vertical_sync(num_ranks: int, num_microbatches: int, microbatches_per_update: int = 1) -> Schedule:
    """`pipedream`, with every forward pinned to the version that stage 0 used.

    Args:
        num_ranks: p.
        num_microbatches: of all mini-batches together.
        microbatches_per_update: how many micro-batches a mini-batch is; the paper has 1.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
    """
    made = updating("pipedream-vertical-sync", num_ranks, num_microbatches, microbatches_per_update)
    newest = used_versions(made)
    pins = (
        Pin(Action(Kind.FORWARD, stage, i), newest[0, i]) for stage in range(num_ranks) for i in range(num_microbatches)
    )
    return replace(made, pins=frozenset(pins))


def peak_versions(shape: Shape) -> Peaks | None:
    """p on every rank, once the pipeline is full of updated mini-batches."""
    p, m, _ = shape
    return (p,) * p if m >= 2 * p - 1 else None


ENTRY = Entry(
    "pipedream-vertical-sync",
    pipedream_vertical_sync,
    Formulas(bubble_s, bubble_s, peak_held, peak_held, peak_versions),
    takes=frozenset({"microbatches_per_update"}),
    demands=(ONE_STAGE,),
    aliases=("pipedream-vsync",),
    microbatches_per_batch=1,
)
