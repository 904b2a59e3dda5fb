"""ZB-V (Qi et al., ICLR 2024, section 6, by fixed phases): two stages on each rank, in a V.

Rank r has stage r on the way down (a) and stage 2p−1−r on the way up (b), so the last rank hands over to itself, and
rank 0 has the model's both ends. For p ranks, m ≥ 2p−1 micro-batches and equal times of F, I and W no rank idles
between its first and last action; the makespan is ``(p−1)T_F`` longer, which no V can undercut. Every rank holds 2p
micro-batches of stages until I and until W: what the first rank of 1F1B holds. With fewer micro-batches, those that
are not there are left out of the order for 2p−1. The authors' own version places W by measured times; these are the
phases as torch has them. 4 ranks × 2 stages × 8 micro-batches::

    GPU 0: 0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 7W3 0F7 0I0 0W0 7F4 7I4 7W4 0I1 0W1 7F5 7I5 7W5 0I2 0W2 7F6 7I6 7W6 0I3 0W3 7F7 7I7 7W7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7   .   .   .
    GPU 1:   . 1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 6I2 6W2 1F6 1I0 1W0 6F4 6I3 6W3 1F7 1I1 1W1 6F5 6I4 6W4 1I2 1W2 6F6 6I5 6W5 1I3 1W3 6F7 6I6 6W6 1I4 6I7 1I5 1W4 1I6 1W5 1I7 1W6 6W7 1W7   .   .
    GPU 2:   .   . 2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 5I1 5W1 2F5 2I0 2W0 5F4 5I2 5W2 2F6 2I1 2W1 5F5 5I3 5W3 2F7 2I2 2W2 5F6 5I4 5W4 2I3 2W3 5F7 5I5 5W5 2I4 5I6 2I5 5I7 2I6 2W4 2I7 2W5 5W6 5W7 2W6 2W7   .
    GPU 3:   .   .   . 3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0 3F4 3I0 3W0 4F4 4I1 4W1 3F5 3I1 3W1 4F5 4I2 4W2 3F6 3I2 3W2 4F6 4I3 4W3 3F7 3I3 3W3 4F7 4I4 4W4 3I4 4I5 3I5 4I6 3I6 4I7 3I7 3W4 4W5 4W6 4W7 3W5 3W6 3W7
"""  # noqa: E501  # a drawing is as wide as it is

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir import Action, Kind, Placement, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks, Times
from pipeloom.schedules.shape import IN_A_V, Shape, require


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Fill both stages, then F, I and W of each in turn, then what is left of them.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
    """
    require("zb-v", Shape(num_ranks, num_microbatches, 2), IN_A_V)
    num_made = max(num_microbatches, 2 * num_ranks - 1)
    programs = tuple(
        tuple(action for action in _program(rank, num_ranks, num_made) if action.microbatch < num_microbatches)
        for rank in range(num_ranks)
    )
    return Schedule(Placement.v(num_ranks), programs, num_microbatches, name="zb-v")


class _Stage:
    """The actions of one stage, each kind in the order of micro-batches."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.num_done = {Kind.FORWARD: 0, Kind.INPUT_GRAD: 0, Kind.WEIGHT_GRAD: 0}

    def __call__(self, *kinds: Kind) -> Iterator[Action]:
        for kind in kinds:
            yield Action(kind, self._stage, self.num_done[kind])
            self.num_done[kind] += 1


F, I, W = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD  # noqa: E741


def _program(rank: int, num_ranks: int, num_made: int) -> Iterator[Action]:
    a, b = _Stage(rank), _Stage(2 * num_ranks - 1 - rank)
    num_behind = num_ranks - rank
    # Fill.
    for _ in range(2 * num_behind - 1):
        yield from a(F)
    for _ in range(rank):
        yield from b(F)
        yield from a(F)
    for _ in range(num_behind):
        yield from b(F, I, W)
    # Steady.
    while b.num_done[F] < num_made:
        if a.num_done[F] < num_made:
            yield from a(F)
        yield from a(I, W)
        yield from b(F, I, W)
    # Drain.
    for _ in range(rank):
        yield from a(I)
        yield from b(I)
    for _ in range(num_behind):
        yield from a(I, W)
    for stage in (b, a):
        while stage.num_done[W] < num_made:
            yield from stage(W)


def bubble_s(shape: Shape, times: Times) -> float | None:
    """``(p−1)T_F`` at equal times."""
    return (shape.num_ranks - 1) * times.forward_s if _holds(shape, times) else None


def unsynchronised_bubble_s(shape: Shape, times: Times) -> float | None:
    """None at equal times."""
    return 0.0 if _holds(shape, times) else None


def _holds(shape: Shape, times: Times) -> bool:
    is_long = shape.num_microbatches >= 2 * shape.num_ranks - 1
    return is_long and times.forward_s == times.input_grad_s == times.weight_grad_s


def peak_held(shape: Shape) -> Peaks | None:
    """2p."""
    p, m, _ = shape
    return (2 * p,) * p if m >= 2 * p - 1 else None


ENTRY = Entry(
    "zb-v",
    zb_v,
    Formulas(bubble_s, unsynchronised_bubble_s, peak_held, peak_held),
    stages_per_rank=2,
    demands=(IN_A_V,),
    aliases=("v-zb", "zbv-zero-bubble", "zero-bubble-v"),
)
