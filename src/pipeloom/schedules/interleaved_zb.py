"""Interleaved zero bubble (torch's ``ScheduleInterleavedZeroBubble``; no paper): interleaved, split backward.

Stages in a loop, v on each of p ranks, m ≥ p micro-batches: bubble ``(p−1)(T_F+T_I−T_W)`` with T of one stage and T_W
no longer than T_F or T_I, v times less than ZB-H1. A whole backward needs two forwards for each rank behind; with a
split one, one does. Rank r holds ``(p−1−r) + (v−1)N + 1`` micro-batches of stages until I, r more until W. Groups of
N as in `pipeloom.schedules.interleaved`. 4 ranks × 2 stages × 8 micro-batches::

    GPU 0: 0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3   .   .   . 4I0 4W0 0F4 4I1 4W1 0F5 4I2 4W2 0F6 4I3 4W3 0F7 0I0 0W0 4F4 0I1 0W1 4F5 0I2 0W2 4F6 0I3 0W3 4F7 4I4 4W4 4I5 4W5 4I6 4W6 4I7 4W7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
    GPU 1:   . 1F0 1F1 1F2 1F3 5F0 5F1 5F2   .   . 5I0 5F3 5I1 5W0 1F4 5I2 5W1 1F5 5I3 5W2 1F6 1I0 5W3 1F7 1I1 1W0 5F4 1I2 1W1 5F5 1I3 1W2 5F6 5I4 1W3 5F7 5I5 5W4 5I6 5W5 5I7 5W6 1I4 5W7 1I5 1W4 1I6 1W5 1I7 1W6 1W7
    GPU 2:   .   . 2F0 2F1 2F2 2F3 6F0 6F1   . 6I0 6F2 6I1 6F3 6I2 6W0 2F4 6I3 6W1 2F5 2I0 6W2 2F6 2I1 6W3 2F7 2I2 2W0 6F4 2I3 2W1 6F5 6I4 2W2 6F6 6I5 2W3 6F7 6I6 6W4 6I7 6W5 2I4 6W6 2I5 6W7 2I6 2W4 2I7 2W5 2W6 2W7
    GPU 3:   .   .   . 3F0 3F1 3F2 3F3 7F0 7I0 7F1 7I1 7F2 7I2 7F3 7I3 7W0 3F4 3I0 7W1 3F5 3I1 7W2 3F6 3I2 7W3 3F7 3I3 3W0 7F4 7I4 3W1 7F5 7I5 3W2 7F6 7I6 3W3 7F7 7I7 7W4 3I4 7W5 3I5 7W6 3I6 7W7 3I7 3W4 3W5 3W6 3W7
"""  # noqa: E501  # a drawing is as wide as it is

from __future__ import annotations

from pipeloom.ir import Placement, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks
from pipeloom.schedules.groups import group_sizes, in_groups, num_warmup
from pipeloom.schedules.phases import one_forward_one_input_grad
from pipeloom.schedules.shape import Shape, require
from pipeloom.schedules.zb_h1 import bubble_s

_PER_HOP = 1


def interleaved_zb(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2, *, group_size: int | None = None
) -> Schedule:
    """The order of interleaved 1F1B with I for B; on rank r, W lags r micro-batches of stages.

    Raises:
        UnsupportedShape: there is no rank, stage or micro-batch, or ``group_size`` is no positive whole number.
    """
    shape = Shape(num_ranks, num_microbatches, stages_per_rank)
    require("interleaved-zb", shape)
    sizes = group_sizes(shape, group_size)
    programs = []
    for rank in range(num_ranks):
        forwards, backwards = in_groups(rank, shape, sizes)
        warmup = num_warmup(rank, shape, sizes, _PER_HOP)
        programs.append(tuple(one_forward_one_input_grad(forwards, backwards, warmup, lag=rank)))
    placement = Placement.loop(num_ranks, stages_per_rank)
    return Schedule(placement, tuple(programs), num_microbatches, name="interleaved-zb")


def peak_held_to_input_grad(shape: Shape) -> Peaks:
    """One more than the forwards before the first I."""
    p, m, v = shape
    sizes = group_sizes(shape, None)
    return tuple(min(num_warmup(rank, shape, sizes, _PER_HOP) + 1, m * v) for rank in range(p))


def peak_held_to_weight_grad(shape: Shape) -> Peaks:
    """r more, by which W lags."""
    _, m, v = shape
    return tuple(min(held + rank, m * v) for rank, held in enumerate(peak_held_to_input_grad(shape)))


ENTRY = Entry(
    "interleaved-zb",
    interleaved_zb,
    Formulas(bubble_s, bubble_s, peak_held_to_input_grad, peak_held_to_weight_grad),
    takes=frozenset({"stages_per_rank", "group_size"}),
    stages_per_rank=2,
    aliases=("interleaved-zero-bubble", "zb-interleaved", "zero-bubble-interleaved"),
)
