"""Interleaved 1F1B (Narayanan et al., SC 2021, section 2.2) with the free group size of Llama 3 (2024, section 3.3.2).

Stages in a loop, v on each of p ranks: a bubble of ``(p−1)(T_F+T_B)``, T of one stage, is v times less than that of
1F1B, and values change ranks v times as often. Rank r holds ``2(p−1−r) + (v−1)N + 1`` micro-batches of stages at
most, N of them in a group. The paper wants m to be a multiple of p, and N = p. Here N is free as in Llama 3 (more
than p hide transfers and hold more; fewer stall), or by default at least p and as even as m allows, as torch has it;
with m < p all are one group, and the bubble is larger. 4 ranks × 2 stages × 8 micro-batches::

    GPU 0: 0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6   .   .   . 4B0---- 0F7 4B1----   . 4F4 4B2---- 4F5 4B3---- 4F6 0B0---- 4F7 0B1---- 0B2----   . 0B3----   . 4B4----   . 4B5----   . 4B6----   . 4B7---- 0B4---- 0B5---- 0B6---- 0B7----
    GPU 1:   . 1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4   .   . 5B0---- 1F5 5B1---- 1F6 5B2---- 1F7 5B3---- 5F4 1B0---- 5F5 1B1---- 5F6 1B2---- 5F7 1B3----   . 5B4----   . 5B5----   . 5B6----   . 5B7---- 1B4---- 1B5---- 1B6---- 1B7----   .   .
    GPU 2:   .   . 2F0 2F1 2F2 2F3 6F0 6F1 6F2   . 6B0---- 6F3 6B1---- 2F4 6B2---- 2F5 6B3---- 2F6 2B0---- 2F7 2B1---- 6F4 2B2---- 6F5 2B3---- 6F6 6B4---- 6F7 6B5----   . 6B6----   . 6B7---- 2B4---- 2B5---- 2B6---- 2B7----   .   .   .   .
    GPU 3:   .   .   . 3F0 3F1 3F2 3F3 7F0 7B0---- 7F1 7B1---- 7F2 7B2---- 7F3 7B3---- 3F4 3B0---- 3F5 3B1---- 3F6 3B2---- 3F7 3B3---- 7F4 7B4---- 7F5 7B5---- 7F6 7B6---- 7F7 7B7---- 3B4---- 3B5---- 3B6---- 3B7----   .   .   .   .   .   .
"""  # noqa: E501  # a drawing is as wide as it is

from __future__ import annotations

from pipeloom.ir import Placement, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks, Times
from pipeloom.schedules.groups import group_sizes, in_groups, num_warmup
from pipeloom.schedules.phases import one_forward_one_backward
from pipeloom.schedules.shape import Shape, require

_PER_HOP = 2


def interleaved(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2, *, group_size: int | None = None
) -> Schedule:
    """Each group of micro-batches through one stage of the rank after another, one forward and one backward in turn.

    Raises:
        UnsupportedShape: there is no rank, stage or micro-batch, or ``group_size`` is no positive whole number.
    """
    shape = Shape(num_ranks, num_microbatches, stages_per_rank)
    require("interleaved", shape)
    sizes = group_sizes(shape, group_size)
    programs = []
    for rank in range(num_ranks):
        forwards, backwards = in_groups(rank, shape, sizes)
        warmup = num_warmup(rank, shape, sizes, _PER_HOP)
        programs.append(tuple(one_forward_one_backward(forwards, backwards, warmup)))
    return Schedule(Placement.loop(num_ranks, stages_per_rank), tuple(programs), num_microbatches, name="interleaved")


def bubble_s(shape: Shape, times: Times) -> float | None:
    """``(p−1)(T_F+T_B)``, where no rank runs out of micro-batches: m ≥ p, or one stage on each."""
    p, m, v = shape
    return (p - 1) * times.step_s if m >= p or v == 1 else None


def peak_held(shape: Shape) -> Peaks:
    """One more than the forwards before the first backward."""
    p, m, v = shape
    sizes = group_sizes(shape, None)
    return tuple(min(num_warmup(rank, shape, sizes, _PER_HOP) + 1, m * v) for rank in range(p))


ENTRY = Entry(
    "interleaved",
    interleaved,
    Formulas(bubble_s, bubble_s, peak_held, peak_held),
    takes=frozenset({"stages_per_rank", "group_size"}),
    stages_per_rank=2,
    aliases=("interleaved-1f1b", "1f1b-interleaved", "1f1b-i", "vpp", "llama3"),
)
