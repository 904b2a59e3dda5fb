"""DualPipe (DeepSeek-V3, 2024, section 3.2.1): two pipelines in opposite directions, forwards over backwards.

Each rank holds a stage of either, so the weights twice; the first half of the micro-batches goes down (stage s on
rank s), the other half up (stage s on rank p−1−s). Bubble for an even p, m ≥ 2p micro-batches and equal stages
``(p/2−1)(T_F&B + T_B − 3T_W)`` where a pair is one indivisible task of T_F&B and T_F = T_I. Where a pair runs one
after the other and sends what its first half made at once, it is ``(p/2−1)(T_F+T_I−T_W)`` for T_W ≤ T_I ≤ T_F ≤ T_B.
p+1 micro-batches held. The paper wants m to be even and 2p at least; here the order is made for such an m, and those
that are not there are left out. 4 ranks × 8 micro-batches, of which 4 to 7 go up::

    GPU 0: F0 F1 F2 F4 I4 W4 F5 F3 B5--- F6 B0--- B6--- F7  . B1--- B7--- I2 W2 I3 W3
    GPU 1:  . F0 F4 F1 F5 F2 B4--- F6 B0--- F3 B5--- F7 B1--- B6--- B2--- I7 I3 W7 W3
    GPU 2:  . F4 F0 F5 F1 F6 B0--- F2 B4--- F7 B1--- F3 B5--- B2--- B6--- I3 I7 W3 W7
    GPU 3: F4 F5 F6 F0 I0 W0 F1 F7 B1--- F2 B4--- B2--- F3  . B5--- B3--- I6 W6 I7 W7
"""

from __future__ import annotations

from pipeloom.ir import Placement, Schedule
from pipeloom.schedules.chimera import DEMANDS
from pipeloom.schedules.eight_phases import Direction, eight_phases, pairs_hide_waits, program_of
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Formulas, Peaks, Times
from pipeloom.schedules.shape import Shape, require


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Half of the micro-batches each way, in eight phases.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch, or an odd number of ranks.
    """
    require("dualpipe", Shape(num_ranks, num_microbatches), *DEMANDS)
    half = -(-num_microbatches // 2)
    num_made = max(half, num_ranks)
    programs, overlaps = [], []
    for rank in range(num_ranks):
        num_before = min(rank, num_ranks - 1 - rank)
        down = Direction(rank, range(half), num_made)
        up = Direction(num_ranks - 1 - rank, range(half, num_microbatches), num_made)
        near, far = (down, up) if num_before == rank else (up, down)
        cells = eight_phases(near, far, num_before, num_ranks // 2 - 1 - num_before)
        program, own = program_of(cells, near, far)
        programs.append(program)
        overlaps += own
    placement = Placement.bidirectional(num_ranks)
    return Schedule(placement, tuple(programs), num_microbatches, name="dualpipe", overlaps=frozenset(overlaps))


def bubble_s(shape: Shape, times: Times) -> float | None:
    """``(p/2−1)(T_F+T_I−T_W)``: the pairs run one after the other."""
    p, m, _ = shape
    holds = m % 2 == 0 and m >= 2 * p and pairs_hide_waits(times)
    return (p // 2 - 1) * (times.forward_s + times.input_grad_s - times.weight_grad_s) if holds else None


def peak_held(shape: Shape) -> Peaks | None:
    """``p+1``."""
    p, m, _ = shape
    return (p + 1,) * p if m >= 2 * p else None


ENTRY = Entry("dualpipe", dualpipe, Formulas(bubble_s, bubble_s, peak_held, peak_held), demands=DEMANDS)
