"""DualPipeV ("cut in half", Sea AI Lab and DeepSeek, 2025): DualPipe on half the ranks, with one copy of the weights.

The two directions are the halves of a V: rank r has stage r on the way down and stage 2p−1−r on the way up. Bubble
for m ≥ 2p micro-batches and equal stages ``(p−1)(T_F+T_I−T_W)``, T of one stage and T_W ≤ T_I ≤ T_F ≤ T_B, where a
pair that could overlap runs one after the other and sends what its first half made at once; 2p+1 micro-batches of
stages held. With fewer micro-batches, those that are not there are left out of the order for 2p. 4 ranks × 2 stages ×
8 micro-batches::

    GPU 0: 0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 0F7 7B3---- 7F4 0B0---- 7B4---- 7F5   . 0B1---- 7B5---- 7F6   . 0B2---- 7B6---- 7F7   . 0B3---- 7B7---- 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
    GPU 1:   . 1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 1F6 6B2---- 6F4 1B0---- 1F7 6B3---- 6F5 1B1---- 6B4---- 6F6   . 1B2---- 6B5---- 6F7   . 1B3---- 6B6---- 1B4---- 6I7 1I5 6W7 1I6 1W5 1I7 1W6 1W7
    GPU 2:   .   . 2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 2F5 5B1---- 5F4 2B0---- 2F6 5B2---- 5F5 2B1---- 2F7 5B3---- 5F6 2B2---- 5B4---- 5F7   . 2B3---- 5B5---- 2B4---- 5B6---- 2I5 5I7 2I6 2W5 2I7 5W7 2W6 2W7
    GPU 3:   .   .   . 3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 3F4 4B0---- 4F4 3B0---- 3F5 4B1---- 4F5 3B1---- 3F6 4B2---- 4F6 3B2---- 3F7 4B3---- 4F7 3B3---- 4B4---- 3B4---- 4B5---- 3B5---- 4I6 3I6 4I7 3I7 4W6 3W6 4W7 3W7
"""  # noqa: E501  # a drawing is as wide as it is

from __future__ import annotations

from pipeloom.ir import Placement, Schedule
from pipeloom.schedules.eight_phases import Direction, eight_phases, pairs_hide_waits, program_of
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks, Times
from pipeloom.schedules.shape import IN_A_V, Shape, require


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """The way down as the near direction, the way up as the far one, in eight phases.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
    """
    require("dualpipe-v", Shape(num_ranks, num_microbatches, 2), IN_A_V)
    microbatches, num_made = range(num_microbatches), max(num_microbatches, 2 * num_ranks)
    programs, overlaps = [], []
    for rank in range(num_ranks):
        near = Direction(rank, microbatches, num_made)
        far = Direction(2 * num_ranks - 1 - rank, microbatches, num_made)
        program, own = program_of(eight_phases(near, far, rank, num_ranks - 1 - rank), near, far)
        programs.append(program)
        overlaps += own
    placement = Placement.v(num_ranks)
    return Schedule(placement, tuple(programs), num_microbatches, name="dualpipe-v", overlaps=frozenset(overlaps))


def bubble_s(shape: Shape, times: Times) -> float | None:
    """``(p−1)(T_F+T_I−T_W)``: the pairs run one after the other."""
    p, m, _ = shape
    holds = m >= 2 * p and pairs_hide_waits(times)
    return (p - 1) * (times.forward_s + times.input_grad_s - times.weight_grad_s) if holds else None


def peak_held(shape: Shape) -> Peaks | None:
    """``2p+1``."""
    p, m, _ = shape
    return (2 * p + 1,) * p if m >= 2 * p else None


ENTRY = Entry(
    "dualpipe-v", dualpipe_v, Formulas(bubble_s, bubble_s, peak_held, peak_held), stages_per_rank=2, demands=(IN_A_V,)
)
