"""Schedules on a V from a building block: the F and I of one micro-batch, repeated every six slots (Qi et al., 2024).

The lifespan of a block is what a rank holds: the sum of the slots between F and I, over six, is the peak. Repeating
leaves gaps at both ends, so what follows is section 4 of the paper: W go into free slots after their I; actions of the
warm-up and the cool-down move to the earliest free slot that needs no more memory than the repeated block; and ranks
run what they have as early as they can (*squeeze*).

A rank's timetable is a row: what it does in each slot. Micro-batches of a kind stand in order, so it has no numbers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from pipeloom.ir import Action, Kind, Placement, Program, Schedule
from pipeloom.schedules.shape import Shape

Block = Callable[[int], tuple[int, int, int, int]]
"""The slots of F on the way down, F on the way up, I down and I up of the first micro-batch on a rank."""
Row = list[int]

PERIOD = 6
_FREE = -1
# Of what a row holds, in the order in which a micro-batch needs it: stage a is on the way down, stage b on the way up.
_FA, _FB, _IB, _IA, _WB, _WA = range(6)
_TO_NEXT_RANK = (_FA, _IB)
_INPUT_GRADS = (_IB, _IA)
_KINDS = {
    _FA: Kind.FORWARD,
    _FB: Kind.FORWARD,
    _IB: Kind.INPUT_GRAD,
    _IA: Kind.INPUT_GRAD,
    _WB: Kind.WEIGHT_GRAD,
    _WA: Kind.WEIGHT_GRAD,
}


def from_blocks(name: str, shape: Shape, block: Block) -> Schedule:
    """Repeat a block, and close the gaps at both ends.

    Args:
        name: of the schedule.
        shape: with two stages per rank.
        block: of each rank; no two of its slots are the same modulo six.
    """
    rows = [_repeated(block(rank), shape.num_microbatches) for rank in range(shape.num_ranks)]
    rows = _squeezed(_moved([_with_weight_grads(row) for row in rows], has_weight_grads=True))
    rows = [_without_weight_grads(row) for row in rows]
    rows = _squeezed([_with_weight_grads(row) for row in _moved(rows, has_weight_grads=False)])
    programs = [_program(_with_weight_grads(_without_weight_grads(row)), rank, shape) for rank, row in enumerate(rows)]
    return Schedule(Placement.v(shape.num_ranks), tuple(programs), shape.num_microbatches, name=name)


def _repeated(offsets: Sequence[int], num_microbatches: int) -> Row:
    row = [_FREE] * (max(offsets) + PERIOD * (num_microbatches - 1) + 1)
    for kind, offset in enumerate(offsets):
        for i in range(num_microbatches):
            row[offset + PERIOD * i] = kind
    return row


def _with_weight_grads(row: Row) -> Row:
    """A W in the first free slot after its I; of those that are due, stage b's first, which frees memory the same."""
    num_b = num_a = 0
    filled = []
    for kind in row:
        num_b += kind == _IB
        num_a += kind == _IA
        if kind == _FREE and num_b:
            filled.append(_WB)
            num_b -= 1
        elif kind == _FREE and num_a:
            filled.append(_WA)
            num_a -= 1
        else:
            filled.append(kind)
    return filled + [_WB] * num_b + [_WA] * num_a


def _without_weight_grads(row: Row) -> Row:
    return [_FREE if kind in (_WB, _WA) else kind for kind in row]


def _squeezed(rows: list[Row]) -> list[Row]:
    """Every rank in its order, each action one slot long and as early as it can."""
    squeezed: list[Row] = [[] for _ in rows]
    ends: list[list[list[int]]] = [[[] for _ in _KINDS] for _ in rows]
    for slot in range(max(map(len, rows))):
        for rank, row in enumerate(rows):
            kind = row[slot] if slot < len(row) else _FREE
            if kind == _FREE:
                continue
            start = len(squeezed[rank])
            i = len(ends[rank][kind])
            if _FA <= kind <= _IA:
                other = rank - 1 if kind in _TO_NEXT_RANK else rank + 1
                if 0 <= other < len(rows):
                    start = max(start, ends[other][kind][i])
                if kind:
                    start = max(start, ends[rank][kind - 1][i])
            squeezed[rank] += [_FREE] * (start - len(squeezed[rank])) + [kind]
            ends[rank][kind].append(start + 1)
    return squeezed


class _Held:
    """What a rank holds after each slot; where no W stands in its row, a free slot does one that is due."""

    def __init__(self, row: Row, has_weight_grads: bool) -> None:
        self._row = row
        self._has_weight_grads = has_weight_grads
        self._after = list(self._from(0, (0, 0)))

    @property
    def peak(self) -> int:
        return max(held for held, _ in self._after)

    def _from(self, first: int, before: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """After each slot from ``first`` on, what is held and how many W are due."""
        held, due = before
        for kind in self._row[first:]:
            if kind in (_FA, _FB):
                held += 1
            elif kind in (_WB, _WA):
                held -= 1
            elif kind != _FREE:
                due += not self._has_weight_grads
            elif due:
                held, due = held - 1, due - 1
            yield held, due

    def fits(self, first: int, last: int, limit: int) -> bool:
        """Whether the row, changed in the slots from ``first`` to ``last``, holds no more than ``limit``."""
        after = []
        for slot, state in enumerate(self._from(first, self._after[first - 1] if first else (0, 0)), first):
            if state[0] > limit:
                return False
            if slot >= last and state == self._after[slot]:
                break
            after.append(state)
        self._after[first : first + len(after)] = after
        return True


def _moved(rows: list[Row], *, has_weight_grads: bool) -> list[Row]:
    """Move what comes before the steady phase, or after it, to the earliest slot at which the peak stays what it is.

    Without W in the rows, only what comes after it.
    """
    begin = rows[0].index(_IA)
    lasts = [(len(row) - 1 - row[::-1].index(_FA), rank) for rank, row in enumerate(rows)]
    end = min((place for place in lasts if place > (begin, 0)), default=(max(map(len, rows)), 0))
    mover = _Mover(rows, has_weight_grads)
    for slot in chain(range(begin + 1 if has_weight_grads else 0), range(max(begin, end[0]), max(map(len, rows)))):
        for rank in range(len(rows)):
            is_before = has_weight_grads and (slot, rank) < (begin, 0)
            if is_before or (slot, rank) > end:
                mover.move(rank, slot)
    return rows


class _Mover:
    """Rows in which actions move, and where each action stands."""

    def __init__(self, rows: list[Row], has_weight_grads: bool) -> None:
        self._rows = rows
        self._held = [_Held(row, has_weight_grads) for row in rows]
        self._limit = max(held.peak for held in self._held)
        self._slots = [[[s for s, k in enumerate(row) if k == kind] for kind in range(4)] for row in rows]
        self._weight_grads = [[s for s, kind in enumerate(row) if kind in (_WB, _WA)] for row in rows]
        self._input_grads = [[s for s, kind in enumerate(row) if kind in _INPUT_GRADS] for row in rows]

    def move(self, rank: int, slot: int) -> None:
        """Move what stands there to the earliest slot at which all that it needs is done and there is room for it."""
        row = self._rows[rank]
        if slot >= len(row) or row[slot] == _FREE:
            return
        kind = row[slot]
        own = self._weight_grads[rank] if kind in (_WB, _WA) else self._slots[rank][kind]
        i = bisect_left(own, slot)
        for earlier in range(self._after_needs(rank, kind, i, own), slot):
            if row[earlier] != _FREE:
                continue
            row[earlier], row[slot] = kind, _FREE
            if self._held[rank].fits(earlier, slot, self._limit):
                own[i] = earlier
                if kind in _INPUT_GRADS:
                    self._input_grads[rank].remove(slot)
                    insort(self._input_grads[rank], earlier)
                return
            row[earlier], row[slot] = _FREE, kind

    def _after_needs(self, rank: int, kind: int, i: int, own: list[int]) -> int:
        """The slot after the last of what the i-th action of a kind needs."""
        needs = [own[i - 1]] if i else []
        if kind in (_WB, _WA):
            needs.append(self._input_grads[rank][i])
        else:
            other = rank - 1 if kind in _TO_NEXT_RANK else rank + 1
            needs += [self._slots[other][kind][i]] if 0 <= other < len(self._rows) else []
            needs += [self._slots[rank][kind - 1][i]] if kind else []
        return max(needs, default=-1) + 1


def _program(row: Row, rank: int, shape: Shape) -> Program:
    a, b = rank, 2 * shape.num_ranks - 1 - rank
    stages = {_FA: a, _FB: b, _IB: b, _IA: a, _WB: b, _WA: a}
    num_done = dict.fromkeys(_KINDS, 0)
    program = []
    for kind in row:
        if kind != _FREE:
            program.append(Action(_KINDS[kind], stages[kind], num_done[kind]))
            num_done[kind] += 1
    return tuple(program)
