"""GIS-H (Wan et al., PipeOffload, 2025, section 3): `pipeloom.schedules.gis` with half the group, so half the memory.

Rank r holds ``(v−1)⌈p/2⌉ + p−r`` micro-batches of stages, of which 1F1B's first rank holds as much as pv. Bubble for
an even p and an m that is a multiple of p/2 ``(p−1)(T_F+T_I) + (v−1)p/2·(T_F+T_I−T_W)``, T of one stage, where
|T_F−T_I| ≤ T_W ≤ T_F and T_I. 4 ranks × 2 stages × 8 micro-batches::

    GPU 0: 0F0 0F1   .   . 4F0 4F1 0F2 0F3   .   .   . 4I0 4W0   . 4F2 4I1 4W1 4F3 0I0 0W0 0F4 0I1 0W1 0F5 4I2 4W2 4F4 4I3 4W3 4F5 0I2 0W2 0F6 0I3 0W3 0F7 4I4 4W4 4F6 4I5 4W5 4F7 0I4 0W4 0I5 0W5   . 4I6 4W6   . 4I7 4W7 0I6 0W6 0I7 0W7
    GPU 1:   . 1F0 1F1   .   . 5F0 5F1 1F2   .   . 5I0 5W0 1F3 5I1 5W1 5F2 1I0 1W0 5F3 1I1 1W1 1F4 5I2 5W2 1F5 5I3 5W3 5F4 1I2 1W2 5F5 1I3 1W3 1F6 5I4 5W4 1F7 5I5 5W5 5F6 1I4 1W4 5F7 1I5 1W5   . 5I6 5W6   . 5I7 5W7 1I6 1W6 1I7 1W7   .
    GPU 2:   .   . 2F0 2F1   .   . 6F0 6F1   . 6I0 6W0 2F2 6I1 6W1 2F3 2I0 2W0 6F2 2I1 2W1 6F3 6I2 6W2 2F4 6I3 6W3 2F5 2I2 2W2 6F4 2I3 2W3 6F5 6I4 6W4 2F6 6I5 6W5 2F7 2I4 2W4 6F6 2I5 2W5 6F7 6I6 6W6   . 6I7 6W7 2I6 2W6 2I7 2W7   .   .
    GPU 3:   .   .   . 3F0 3F1   .   . 7F0 7I0 7W0 7F1 7I1 7W1 3F2 3I0 3W0 3F3 3I1 3W1 7F2 7I2 7W2 7F3 7I3 7W3 3F4 3I2 3W2 3F5 3I3 3W3 7F4 7I4 7W4 7F5 7I5 7W5 3F6 3I4 3W4 3F7 3I5 3W5 7F6 7I6 7W6 7F7 7I7 7W7 3I6 3W6 3I7 3W7   .   .   .
"""  # noqa: E501  # a drawing is as wide as it is

from __future__ import annotations

from pipeloom.ir import Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks, Times
from pipeloom.schedules.gis import half_of, with_groups
from pipeloom.schedules.gis import peak_held as peak_held_in_groups
from pipeloom.schedules.shape import Shape, require


def gis_h(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Groups of half as many micro-batches as there are ranks.

    Raises:
        UnsupportedShape: there is no rank, stage or micro-batch.
    """
    shape = Shape(num_ranks, num_microbatches, stages_per_rank)
    require("gis-h", shape)
    return with_groups("gis-h", shape, half_of(num_ranks))


def bubble_s(shape: Shape, times: Times) -> float | None:
    """``(p−1)(T_F+T_I) + (v−1)p/2·(T_F+T_I−T_W)``."""
    p, m, v = shape
    least_s, most_s = sorted((times.forward_s, times.input_grad_s))
    if p % 2 or m % half_of(p) or not most_s - least_s <= times.weight_grad_s <= least_s:
        return None
    more_s = (v - 1) * half_of(p) * (times.forward_s + times.input_grad_s - times.weight_grad_s)
    return (p - 1) * (times.forward_s + times.input_grad_s) + more_s


def peak_held(shape: Shape) -> Peaks:
    """One more than the forwards before the first I."""
    return peak_held_in_groups(shape, half_of(shape.num_ranks))


ENTRY = Entry(
    "gis-h",
    gis_h,
    Formulas(bubble_s, bubble_s, peak_held, peak_held),
    takes=frozenset({"stages_per_rank"}),
    stages_per_rank=2,
)
