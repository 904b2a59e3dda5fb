"""Hanayo (Liu et al., SC 2023): micro-batches run down and up the ranks in waves.

W waves are 2W stages on each of p ranks, placed down, up, down, …; so at every turn a rank hands over to itself. It
is Chimera without a second copy of the weights. A block of p micro-batches enters two slots apart; F of stage s has
slot ``s + 2k`` and B ``2S−1−s+2k`` for the k-th of it and S = 2Wp stages, and blocks follow 2S slots apart. No two
meet, at any W. That order is derived from the paper's construction and not compared with its authors' code. Bubble of
one block ``2(p−1)T_B`` where T_B is T_F or 2T_F (so ``(p−1)/(2Wp+p−1)`` or ``(2p−2)/(3Wp+2p−2)``); rank r holds
``(2W−1)p + r + 1`` micro-batches of stages. Any m: of the last block those that are not there are left out. 4 ranks ×
2 stages (one wave) × 8 micro-batches::

    GPU 0: 0F0 0F1 0F2 0F3   .   .   . 7F0 7B0---- 7F1 7B1---- 7F2 7B2---- 7F3 7B3----   .   .   . 0B0---- 0F4   . 0B1---- 0F5   . 0B2---- 0F6   . 0B3---- 0F7 7F4 7B4---- 7F5 7B5---- 7F6 7B6---- 7F7 7B7----   .   .   . 0B4----   .   . 0B5----   .   . 0B6----   .   . 0B7----
    GPU 1:   . 1F0 1F1 1F2   .   . 6F0 1F3 6F1   . 6B0---- 6F2 6B1---- 6F3 6B2----   .   . 1B0---- 6B3---- 1B1---- 1F4   . 1B2---- 1F5   . 1B3---- 1F6 6F4   . 1F7 6F5   . 6B4---- 6F6 6B5---- 6F7 6B6----   .   . 1B4---- 6B7---- 1B5----   .   . 1B6----   .   . 1B7----   .   .
    GPU 2:   .   . 2F0 2F1   . 5F0 2F2 5F1 2F3 5F2   .   . 5B0---- 5F3 5B1----   . 2B0---- 5B2---- 2B1---- 5B3---- 2B2---- 2F4   . 2B3---- 2F5 5F4   . 2F6 5F5   . 2F7 5F6   .   . 5B4---- 5F7 5B5----   . 2B4---- 5B6---- 2B5---- 5B7---- 2B6----   .   . 2B7----   .   .   .   .
    GPU 3:   .   .   . 3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3   .   .   . 4B0---- 3B0---- 4B1---- 3B1---- 4B2---- 3B2---- 4B3---- 3B3---- 3F4 4F4   . 3F5 4F5   . 3F6 4F6   . 3F7 4F7   .   .   . 4B4---- 3B4---- 4B5---- 3B5---- 4B6---- 3B6---- 4B7---- 3B7----   .   .   .   .   .   .
"""  # noqa: E501  # a drawing is as wide as it is

from __future__ import annotations

from pipeloom.ir import Placement, Schedule
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks, Times
from pipeloom.schedules.shape import Demand, Shape, require
from pipeloom.schedules.slots import in_order_of_slots

DEMANDS = (
    Demand(
        lambda shape: shape.stages_per_rank % 2 == 0,
        "it holds an even number of stages on each",
        "a wave runs down the ranks and up again",
    ),
)


def hanayo(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """As many waves as half the stages per rank.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch, or an odd number of stages on each rank.
    """
    shape = Shape(num_ranks, num_microbatches, stages_per_rank)
    require("hanayo", shape, *DEMANDS)
    placement = Placement.wave(num_ranks, stages_per_rank // 2)
    num_stages = placement.num_stages
    enters = [2 * num_stages * (i // num_ranks) + 2 * (i % num_ranks) for i in range(num_microbatches)]
    programs = []
    for rank in range(num_ranks):
        own = placement.stages_of(rank)
        forwards = ((enter + s, s, i) for s in own for i, enter in enumerate(enters))
        backwards = ((enter + 2 * num_stages - 1 - s, s, i) for s in own for i, enter in enumerate(enters))
        programs.append(in_order_of_slots(forwards, backwards))
    return Schedule(placement, tuple(programs), num_microbatches, name="hanayo")


def bubble_s(shape: Shape, times: Times) -> float | None:
    """``2(p−1)T_B`` for one block, where T_B is T_F or 2T_F."""
    p, m, _ = shape
    ratio = times.backward_s / times.forward_s
    return 2 * (p - 1) * times.backward_s if m == p and ratio in (1, 2) else None


def peak_held(shape: Shape) -> Peaks | None:
    """``(2W−1)p + r + 1``."""
    p, m, v = shape
    return tuple((v - 1) * p + rank + 1 for rank in range(p)) if m >= p else None


ENTRY = Entry(
    "hanayo",
    hanayo,
    Formulas(bubble_s, bubble_s, peak_held, peak_held),
    takes=frozenset({"stages_per_rank"}),
    stages_per_rank=2,
    demands=DEMANDS,
    aliases=("wave",),
)
