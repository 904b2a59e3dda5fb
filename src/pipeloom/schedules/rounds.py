"""The zero-bubble heuristic (Qi et al., ICLR 2024, section 3.1): an order from costs and a limit of memory.

Ranks go in rounds, one F and one I on each, and W fill what waits there are, or make room. Three things can be decided
either way (`Choices`), so eight orders are made, and the one with the shortest longest rank span is kept. The paper
adds an integer program, which its released code leaves switched off. A limit of fewer micro-batches than ranks starves
the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple

from pipeloom.errors import CostError
from pipeloom.ir import Action, Kind, Placement, Schedule
from pipeloom.schedules.shape import Shape, require
from pipeloom.schedules.stage_costs import StageCosts

F, I, W = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD  # noqa: E741


class Choices(NamedTuple):
    """What can be decided either way.

    Attributes:
        delays_input_grad: the last forward of the warm-up may end after the first I could begin.
        skips_forwards: a rank two forwards ahead of the next one may leave out the forward of a round.
        fills_partly: a W that is longer than a wait stands there even if another rank waits longer in all.
    """

    delays_input_grad: bool
    skips_forwards: bool
    fills_partly: bool


def shortest(name: str, shape: Shape, costs: StageCosts | None, limit: int) -> Schedule:
    """The best of the eight orders.

    Args:
        name: of the schedule.
        shape: with one stage per rank.
        costs: of one stage per rank; None: equal seconds. Without bytes, half of what is held until I stays until W.
        limit: micro-batches that a rank may hold; at least as many as there are ranks.

    Raises:
        UnsupportedShape: there is no rank or no micro-batch.
        CostError: the costs are for another number of stages.
    """
    require(name, shape)
    if costs is not None and len(costs.forward_s) != shape.num_ranks:
        raise CostError(f"costs of {len(costs.forward_s)} stages were given for a schedule of {shape.num_ranks}")
    works = [_Work.of(rank, costs, limit) for rank in range(shape.num_ranks)]
    transfer_s = 0.0 if costs is None else costs.transfer_s
    tries = [_Rounds(works, shape, transfer_s, Choices(*each)) for each in product((False, True), repeat=3)]
    best = min(tries, key=lambda rounds: rounds.longest_rank_span_s)
    programs = tuple(tuple(rank.program) for rank in best.ranks)
    return Schedule(Placement.single(shape.num_ranks), programs, shape.num_microbatches, name=name)


class _Work(NamedTuple):
    """What F, I and W of a rank take, what each adds to what the rank holds, and how much that may be."""

    seconds: dict[Kind, float]
    added_bytes: dict[Kind, int]
    limit_bytes: int

    @classmethod
    def of(cls, rank: int, costs: StageCosts | None, limit: int) -> _Work:
        seconds, held, stays = dict.fromkeys((F, I, W), 1.0), 2, 1
        if costs is not None:
            seconds = {F: costs.forward_s[rank], I: costs.input_grad_s[rank], W: costs.weight_grad_s[rank]}
            if any(costs.bytes_held_to_input_grad):
                held, stays = costs.bytes_held_to_input_grad[rank], costs.bytes_held_to_weight_grad[rank]
        return cls(seconds, {F: held, I: stays - held, W: -stays}, limit * held)


class _Rank:
    """How far a rank has come."""

    def __init__(self, stage: int, work: _Work) -> None:
        self.program: list[Action] = []
        self.seconds = work.seconds
        self.ends_s: dict[Kind, list[float]] = {F: [], I: [], W: []}
        self.clock_s = 0.0
        self.bubble_s = 0.0
        self._stage = stage
        self._work = work
        self._held_bytes = 0

    def num_done(self, kind: Kind) -> int:
        return len(self.ends_s[kind])

    @property
    def has_weight_grad(self) -> bool:
        """Whether the W of an I is left to do."""
        return self.num_done(W) < self.num_done(I)

    @property
    def span_s(self) -> float:
        return self.clock_s - self.ends_s[F][0] + self.seconds[F]

    def has_room(self, kind: Kind, count: int = 1) -> bool:
        return self._held_bytes + count * self._work.added_bytes[kind] <= self._work.limit_bytes

    def seconds_to_make_room(self) -> float:
        """How long the W take that must be done before another F has room."""
        num_left = self.num_done(I) - self.num_done(W)
        excess_bytes = self._held_bytes + self._work.added_bytes[F] - self._work.limit_bytes
        num_needed = next((i for i in range(num_left) if excess_bytes + i * self._work.added_bytes[W] <= 0), num_left)
        return num_needed * self.seconds[W]

    def do(self, kind: Kind, ready_s: float = 0.0) -> None:
        """Do the next action of a kind, once what it needs is there."""
        start_s = max(self.clock_s, ready_s)
        if self.num_done(F):
            self.bubble_s += start_s - self.clock_s
        self.program.append(Action(kind, self._stage, self.num_done(kind)))
        self.clock_s = start_s + self.seconds[kind]
        self.ends_s[kind].append(self.clock_s)
        self._held_bytes += self._work.added_bytes[kind]


class _Rounds:
    """One of the eight orders."""

    def __init__(self, works: Sequence[_Work], shape: Shape, transfer_s: float, choices: Choices) -> None:
        self.ranks = [_Rank(stage, work) for stage, work in enumerate(works)]
        self._num_microbatches = shape.num_microbatches
        self._transfer_s = transfer_s
        self._choices = choices
        self._longest_bubble_s = 0.0
        self._fill()
        for _ in range(shape.num_microbatches - 1):
            self._forwards([int(forwards) for forwards in self._who_forwards()])
            self._input_grads()
        for rank in self.ranks:
            while rank.has_weight_grad:
                rank.do(W)

    @property
    def longest_rank_span_s(self) -> float:
        return max(rank.span_s for rank in self.ranks)

    def _fill(self) -> None:
        """The forwards before the first I, and that I."""
        self._forwards([1] * len(self.ranks))
        counts = self._forwards_that_fit()
        for number in range(1, len(counts)):
            # Each rank runs further ahead than the next one, or that one would wait for forwards.
            if 1 + counts[number] < self._num_microbatches:
                counts[number] = max(0, min(counts[number], counts[number - 1] - 1))
        self._forwards(counts)
        self._input_grads()

    def _forwards_that_fit(self) -> list[int]:
        """Per rank, how many forwards more there is time for before the first I, and room."""
        last = self.ranks[-1]
        counts, input_grad_end_s = [0] * len(self.ranks), last.clock_s + last.seconds[I]
        for number in reversed(range(len(self.ranks) - 1)):
            rank, end_s = self.ranks[number], self.ranks[number].clock_s
            arrival_s = input_grad_end_s + self._transfer_s
            while 1 + counts[number] < self._num_microbatches and rank.has_room(F, counts[number] + 1):
                if end_s >= arrival_s if self._choices.delays_input_grad else end_s + rank.seconds[F] > arrival_s:
                    break
                counts[number] += 1
                end_s += rank.seconds[F]
            input_grad_end_s = max(end_s, arrival_s) + rank.seconds[I]
        return counts

    def _who_forwards(self) -> list[bool]:
        """Per rank, whether it has a forward in this round; none has without all ranks after it."""
        forwards = [rank.num_done(F) < self._num_microbatches for rank in self.ranks]
        if self._choices.skips_forwards:
            for number, (rank, after) in enumerate(pairwise(self.ranks)):
                forwards[number] = forwards[number] and not self._can_skip(rank, after)
        for number in reversed(range(len(forwards) - 1)):
            forwards[number] = forwards[number] and forwards[number + 1]
        return forwards

    def _can_skip(self, rank: _Rank, after: _Rank) -> bool:
        """Whether the next I would be there about as early as a forward could be done."""
        if rank.num_done(F) < after.num_done(F) + 2:
            return False
        arrival_s = after.clock_s + after.seconds[F] + after.seconds[I] + self._transfer_s
        if rank.clock_s >= arrival_s:
            return True
        if rank.clock_s + rank.seconds[F] + rank.seconds_to_make_room() <= arrival_s:
            return False
        return arrival_s - rank.clock_s <= self._longest_bubble_s - rank.bubble_s

    def _forwards(self, counts: Sequence[int]) -> None:
        """So many forwards on each rank, from the first to the last."""
        before: _Rank | None = None
        for rank, count in zip(self.ranks, counts, strict=True):
            for _ in range(count):
                self._do(rank, F, None if before is None else before.ends_s[F][rank.num_done(F)])
            before = rank

    def _input_grads(self) -> None:
        """An I on each rank, from the last to the first."""
        after: _Rank | None = None
        for rank in reversed(self.ranks):
            if rank is self.ranks[0] and rank.num_done(F) == self._num_microbatches:
                while rank.has_weight_grad:
                    rank.do(W)
            self._do(rank, I, None if after is None else after.ends_s[I][rank.num_done(I)])
            after = rank

    def _do(self, rank: _Rank, kind: Kind, made_s: float | None) -> None:
        """An F or I, and before it the W that make room for it or fill the wait for it."""
        while rank.has_weight_grad and not rank.has_room(kind):
            rank.do(W)
        ready_s = 0.0 if made_s is None else made_s + self._transfer_s
        while rank.has_weight_grad and rank.clock_s + rank.seconds[W] <= ready_s:
            rank.do(W)
        if rank.has_weight_grad and rank.clock_s < ready_s:
            is_longest = ready_s - rank.clock_s > self._longest_bubble_s - rank.bubble_s
            if is_longest or self._choices.fills_partly:
                rank.do(W)
        rank.do(kind, ready_s)
        self._longest_bubble_s = max(self._longest_bubble_s, rank.bubble_s)
