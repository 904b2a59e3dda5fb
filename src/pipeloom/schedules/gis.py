"""GIS (Wan et al., PipeOffload, 2025, section 3): interleaved with a split backward, in the memory of 1F1B.

Stages in a loop, v on each of p ranks, W right after its I. A warm-up of one forward for each rank behind holds
``(v−1)g + p−r`` micro-batches of stages on rank r, g of them in a group with ⌈p/2⌉ ≤ g ≤ p: for g = p never more than
what 1F1B's first rank holds. Bubble ``(p−1)(T_F+T_I)``, T of one stage, for an m that is a multiple of g = p; each
less in g makes ``(v−1)(T_F+T_I−T_W)`` more. Where m is no multiple of g, groups are as even as m allows and none is
larger. 4 ranks × 2 stages × 8 micro-batches::

    GPU 0: 0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3   .   .   . 4I0 4W0 0F4 4I1 4W1 0F5 4I2 4W2 0F6 4I3 4W3 0F7 0I0 0W0 4F4 0I1 0W1 4F5 0I2 0W2 4F6 0I3 0W3 4F7 4I4 4W4   . 4I5 4W5   . 4I6 4W6   . 4I7 4W7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
    GPU 1:   . 1F0 1F1 1F2 1F3 5F0 5F1 5F2   .   . 5I0 5W0 5F3 5I1 5W1 1F4 5I2 5W2 1F5 5I3 5W3 1F6 1I0 1W0 1F7 1I1 1W1 5F4 1I2 1W2 5F5 1I3 1W3 5F6 5I4 5W4 5F7 5I5 5W5   . 5I6 5W6   . 5I7 5W7 1I4 1W4 1I5 1W5 1I6 1W6 1I7 1W7   .
    GPU 2:   .   . 2F0 2F1 2F2 2F3 6F0 6F1   . 6I0 6W0 6F2 6I1 6W1 6F3 6I2 6W2 2F4 6I3 6W3 2F5 2I0 2W0 2F6 2I1 2W1 2F7 2I2 2W2 6F4 2I3 2W3 6F5 6I4 6W4 6F6 6I5 6W5 6F7 6I6 6W6   . 6I7 6W7 2I4 2W4 2I5 2W5 2I6 2W6 2I7 2W7   .   .
    GPU 3:   .   .   . 3F0 3F1 3F2 3F3 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 7W3 3F4 3I0 3W0 3F5 3I1 3W1 3F6 3I2 3W2 3F7 3I3 3W3 7F4 7I4 7W4 7F5 7I5 7W5 7F6 7I6 7W6 7F7 7I7 7W7 3I4 3W4 3I5 3W5 3I6 3W6 3I7 3W7   .   .   .
"""  # noqa: E501  # a drawing is as wide as it is

from __future__ import annotations

from pipeloom.errors import UnsupportedShape
from pipeloom.ir import Placement, Schedule
from pipeloom.ir.counts import is_whole
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks, Times
from pipeloom.schedules.groups import in_groups, num_warmup
from pipeloom.schedules.phases import one_forward_one_input_grad
from pipeloom.schedules.shape import Shape, require

_PER_HOP = 1


def gis(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2, *, group_size: int | None = None) -> Schedule:
    """Groups of as many micro-batches as there are ranks, or of ``group_size``; then F, I and W in turn.

    Raises:
        UnsupportedShape: there is no rank, stage or micro-batch, or ``group_size`` is not between p/2 and p.
    """
    shape = Shape(num_ranks, num_microbatches, stages_per_rank)
    require("gis", shape)
    return with_groups("gis", shape, num_ranks if group_size is None else _checked(num_ranks, group_size))


def with_groups(name: str, shape: Shape, group_size: int) -> Schedule:
    """The schedule with groups of ``group_size`` at most."""
    sizes = _sizes(shape, group_size)
    programs = []
    for rank in range(shape.num_ranks):
        forwards, backwards = in_groups(rank, shape, sizes)
        warmup = num_warmup(rank, shape, sizes, _PER_HOP)
        programs.append(tuple(one_forward_one_input_grad(forwards, backwards, warmup, lag=0)))
    placement = Placement.loop(shape.num_ranks, shape.stages_per_rank)
    return Schedule(placement, tuple(programs), shape.num_microbatches, name=name)


def _sizes(shape: Shape, group_size: int) -> list[int]:
    m = shape.num_microbatches
    num_groups = -(-m // group_size)
    return [m // num_groups + (i < m % num_groups) for i in range(num_groups)]


def half_of(num_ranks: int) -> int:
    """The smallest group that does not starve the pipeline."""
    return -(-num_ranks // 2)


def _checked(num_ranks: int, group_size: int) -> int:
    if not is_whole(group_size) or not half_of(num_ranks) <= group_size <= num_ranks:
        raise UnsupportedShape(
            f"group_size={group_size!r} was given to 'gis' on {num_ranks} ranks; {half_of(num_ranks)} to {num_ranks} "
            "are possible: fewer than half the ranks starve the pipeline, more than all hold memory for nothing"
        )
    return group_size


def bubble_s(shape: Shape, times: Times) -> float | None:
    """``(p−1)(T_F+T_I)``."""
    p, m, _ = shape
    return (p - 1) * (times.forward_s + times.input_grad_s) if m % p == 0 else None


def peak_held(shape: Shape, group_size: int | None = None) -> Peaks:
    """One more than the forwards before the first I."""
    p, m, v = shape
    sizes = _sizes(shape, group_size or p)
    return tuple(min(num_warmup(rank, shape, sizes, _PER_HOP) + 1, m * v) for rank in range(p))


ENTRY = Entry(
    "gis",
    gis,
    Formulas(bubble_s, bubble_s, peak_held, peak_held),
    takes=frozenset({"stages_per_rank", "group_size"}),
    stages_per_rank=2,
)
