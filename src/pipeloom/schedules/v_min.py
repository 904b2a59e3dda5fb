"""V-Min (Qi et al., NeurIPS 2024, "controllable memory", section 3): a third of the memory of 1F1B, on a V.

Two stages on each of p ranks, in a V; every rank holds ``2⌊(p+4)/3⌋`` micro-batches of stages, where 1F1B's first
rank holds as much as 2p of them: the least that a V can with full throughput. Bubble at equal times of F, I and W
``(4p−5)T_F``, or ``(4p−7)T_F`` where p is a multiple of 3, for m ≥ 2p (read off simulations); the block waits in
every period unless T_F = T_I = T_W, and then 1F1B can be faster. Any number of micro-batches. 4 ranks × 2 stages × 8
micro-batches::

    GPU 0: 0F0 0F1 0F2   .   .   .   . 7F0 7I0 7W0 7F1 7I1 7W1   .   . 0I0 0W0 0F3   . 7F2 7I2 0I1 7W2 0W1 0F4 7F3 7I3 0I2 7W3 0W2 0F5 7F4 7I4 0I3 7W4 0W3 0F6 7F5 7I5 0I4 7W5 0W4 0F7 7F6 7I6 0I5 7W6 0W5   . 7F7 7I7 0I6 7W7 0W6   .   .   . 0I7 0W7
    GPU 1:   . 1F0 1F1   .   .   . 6F0   . 6F1 6I0 6W0 1F2   .   . 1I0 6I1 6W1 1W0 6F2 1F3 1I1 6I2 6W2 1W1 6F3 1F4 1I2 6I3 6W3 1W2 6F4 1F5 1I3 6I4 6W4 1W3 6F5 1F6 1I4 6I5 6W5 1W4 6F6 1F7 1I5 6I6 6W6 1W5 6F7   . 1I6 6I7 6W7 1W6   .   . 1I7 1W7   .
    GPU 2:   .   . 2F0 2F1   . 5F0   . 5F1   .   . 5I0 5W0 2F2 2I0 2W0   . 5I1 5F2 5W1 2I1 2F3 2W1 5I2 5F3 5W2 2I2 2F4 2W2 5I3 5F4 5W3 2I3 2F5 2W3 5I4 5F5 5W4 2I4 2F6 2W4 5I5 5F6 5W5 2I5 2F7 2W5 5I6 5F7 5W6 2I6 2W6   . 5I7 5W7   . 2I7 2W7   .   .
    GPU 3:   .   .   . 3F0 4F0 3F1 4F1   .   .   .   . 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 3F3 4F3 4I2 3I2 4W2 3W2 3F4 4F4 4I3 3I3 4W3 3W3 3F5 4F5 4I4 3I4 4W4 3W4 3F6 4F6 4I5 3I5 4W5 3W5 3F7 4F7 4I6 3I6 4W6 3W6   .   . 4I7 3I7 4W7 3W7   .   .
"""  # noqa: E501  # a drawing is as wide as it is

from __future__ import annotations

from pipeloom.ir import Schedule
from pipeloom.schedules.building_blocks import from_blocks
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks, Times
from pipeloom.schedules.shape import IN_A_V, Shape, require


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Repeat a block in which a micro-batch goes down and up without a wait.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
    """
    shape = Shape(num_ranks, num_microbatches, 2)
    require("v-min", shape, IN_A_V)
    shift = 2 if num_ranks % 3 == 0 else 0

    def block(rank: int) -> tuple[int, int, int, int]:
        return rank, 2 * num_ranks - rank - 1, 2 * num_ranks + shift + rank, 4 * num_ranks + shift - rank - 1

    return from_blocks("v-min", shape, block)


def bubble_s(shape: Shape, times: Times) -> float | None:
    """At equal times ``(4p−5)T_F``, or ``(4p−7)T_F`` where p is a multiple of 3."""
    p, m, _ = shape
    holds = p >= 2 and m >= 2 * p and times.forward_s == times.input_grad_s == times.weight_grad_s
    return (4 * p - (5 if p % 3 else 7)) * times.forward_s if holds else None


def peak_held(shape: Shape) -> Peaks | None:
    """``2⌊(p+4)/3⌋``; some ranks hold one less where p leaves 2 when divided by 3."""
    p, m, _ = shape
    return (2 * ((p + 4) // 3),) * p if m >= 2 * p and p % 3 != 2 else None


ENTRY = Entry("v-min", v_min, Formulas(bubble_s, bubble_s, peak_held, peak_held), stages_per_rank=2, demands=(IN_A_V,))
