"""V-Half (Qi et al., NeurIPS 2024, "controllable memory", section 3): half the memory of 1F1B, on a V.

Two stages on each of p ranks, in a V; every rank holds ``2⌊(p+2)/2⌋`` micro-batches of stages, where 1F1B's first
rank holds as much as 2p of them. Bubble at equal times of F, I and W ``(3p−7)T_F`` for even p and ``(3p−4)T_F`` for
odd p, p ≥ 3 and m ≥ 2p: about half of 1F1B's. (Both were read off simulations.) The repeated block fits without a
wait only if T_W + 2T_I ≥ 2T_F and T_W + 2T_F ≥ 2T_I. Any number of micro-batches. 4 ranks × 2 stages × 8
micro-batches::

    GPU 0: 0F0 0F1 0F2 0F3 0F4   .   . 7F0 7I0 7W0 7F1 7I1 7W1 7F2   .   . 0I0 7I2 7W2 7F3 0W0 0F5 0I1 7I3 7W3 7F4 0W1 0F6 0I2 7I4 7W4 7F5 0W2 0F7 0I3 7I5 7W5 7F6 7I6 7W6 0I4 0W3 0W4 7F7 7I7 0I5 7W7 0I6 0W5 0W6   . 0I7 0W7
    GPU 1:   . 1F0 1F1 1F2 1F3   . 6F0   . 6F1 6I0 6W0 6F2 6I1 6W1   . 1I0 1W0 1F4 6F3 6I2 6W2 1I1 1W1 1F5 6F4 6I3 6W3 1I2 1W2 1F6 6F5 6I4 6W4 1I3 1F7 1W3 6F6 6I5 6W5 1I4 6I6 6W6 6F7 1W4 1I5 6I7 1I6 6W7 1W5 1W6 1I7 1W7   .
    GPU 2:   .   . 2F0 2F1 2F2 5F0   . 5F1   . 5F2 5I0 5W0 2F3 5I1 2I0 5W1 2W0 5F3 2F4   . 2I1 5I2 5W2 5F4 2W1 2F5 2I2 5I3 5W3 5F5 2W2 2F6 2I3 5I4 5W4 5F6 2W3 2F7 2I4 5I5 5W5 5F7 5I6 2I5 5W6 2I6 5I7 5W7 2W4 2I7 2W5 2W6 2W7
    GPU 3:   .   .   . 3F0 4F0 3F1 4F1 3F2 4F2   .   . 4I0 4W0 3I0 3W0 3F3 4F3 4I1 4W1 3I1 3W1 3F4 4F4 4I2 4W2 3I2 3W2 3F5 4F5 4I3 4W3 3I3 3F6 3W3 4F6 4I4 3I4 4W4 3F7 3W4 4F7 4I5 3I5 4I6 3I6 4W5 4W6 4I7 3I7 4W7 3W5 3W6 3W7
"""  # noqa: E501  # a drawing is as wide as it is

from __future__ import annotations

from pipeloom.ir import Schedule
from pipeloom.schedules.building_blocks import from_blocks
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks, Times
from pipeloom.schedules.shape import IN_A_V, Shape, require


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Repeat a block in which a micro-batch goes down at half speed and comes up at full speed.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
    """
    shape = Shape(num_ranks, num_microbatches, 2)
    require("v-half", shape, IN_A_V)
    shift = 3 if num_ranks % 2 == 0 else 0

    def block(rank: int) -> tuple[int, int, int, int]:
        first_up = 3 * num_ranks + shift + 2 * rank - 1
        return 2 * rank, 3 * num_ranks - rank - 2, first_up, 6 * num_ranks + shift - rank - 2

    return from_blocks("v-half", shape, block)


def bubble_s(shape: Shape, times: Times) -> float | None:
    """At equal times ``(3p−7)T_F`` for an even p ≥ 4, ``(3p−4)T_F`` for an odd p ≥ 3."""
    p, m, _ = shape
    holds = p >= 3 and m >= 2 * p and times.forward_s == times.input_grad_s == times.weight_grad_s
    return (3 * p - (4 if p % 2 else 7)) * times.forward_s if holds else None


def peak_held(shape: Shape) -> Peaks | None:
    """``2⌊(p+2)/2⌋``."""
    p, m, _ = shape
    return (2 * ((p + 2) // 2),) * p if m >= 2 * p else None


ENTRY = Entry(
    "v-half", v_half, Formulas(bubble_s, bubble_s, peak_held, peak_held), stages_per_rank=2, demands=(IN_A_V,)
)
