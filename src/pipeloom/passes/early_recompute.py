"""Recomputation in the waits of its rank.

R needs no gradient, so right before its backward it runs while its rank waits for one. Where a rank waits for anything
else before, for a forward's input or for the gradient of another micro-batch, R could have run then too, and the
backward would come at once (GPipe, Huang et al., NeurIPS 2019, section 2.3). That costs memory: activations are held
from R on. So R goes into an earlier wait only if the step is shorter for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from pipeloom.ir import Action, Kind, Program, Schedule, Timeline
from pipeloom.ir.peaks import HeldBytes, bytes_held

_ROUNDING = 1e-9


def early_recompute(
    schedule: Schedule,
    timeline_of: Callable[[Schedule], Timeline],
    *,
    held: HeldBytes | None = None,
    max_bytes: int | None = None,
) -> Schedule:
    """Move each R into an earlier wait of its rank, where it fits and shortens the step.

    By ``timeline_of`` the step is never longer than before, neither from the first start to the last end, nor on the
    rank that takes longest. Every R is moved that fits, first; then each goes back that the step does not need.

    Args:
        schedule: with R in its programs (`add_recompute`), with transfers or without, and without what is done with
            parameters (`add_sharding` comes after this).
        timeline_of: when each action runs: ``partial(simulate, costs=costs)``, for instance. It is asked often.
        held: what a micro-batch holds on each stage; `pipeloom.cost.Costs` is one. Needed with ``max_bytes``.
        max_bytes: of activations, on each rank, that a move may lead to; None: no limit.
    """
    early, before = schedule, None
    while early != before:
        before, timeline = early, timeline_of(early)
        waits = (_Waits(early, timeline, rank, held, max_bytes) for rank in range(early.num_ranks))
        early = early.with_programs(each.filled() for each in waits)
    return _Return(schedule, early, timeline_of).done()


class _Waits:
    """One rank: its program, and how long it waits before each of its actions."""

    def __init__(
        self, schedule: Schedule, timeline: Timeline, rank: int, held: HeldBytes | None, max_bytes: int | None
    ) -> None:
        spans = [span for span in timeline.spans(rank) if span.action.kind.is_compute]
        seconds = {second for _, second in schedule.overlaps}
        self._program = list(schedule.program(rank))
        self._duration_s = {span.action: span.duration_s for span in spans}
        self._waits_s = {
            span.action: span.start_s - last.end_s
            for last, span in pairwise(spans)
            if span.start_s > last.end_s and span.action not in seconds
        }
        self._bytes_in = None if held is None else bytes_held(schedule, held)
        self._max_bytes = max_bytes

    def filled(self) -> Sequence[Action]:
        """The program with its waits filled, the first one first, by what is needed first.

        No action starts later for it: what moves takes no more time than was there, and what came after it comes the
        sooner.
        """
        for action, wait_s in self._waits_s.items():
            for again in list(self._known_before(action)):
                length_s = self._duration_s[again]
                if length_s > wait_s * (1 + _ROUNDING) or not self._put_before(action, again):
                    break
                wait_s -= length_s
        return self._program

    def _known_before(self, action: Action) -> Iterator[Action]:
        """The recomputations that stand after ``action`` and whose forward stands before it."""
        place = self._program.index(action)
        before = {(each.stage, each.microbatch) for each in self._program[:place] if each.kind is Kind.FORWARD}
        for each in self._program[place + 1 :]:
            if each.kind is Kind.RECOMPUTE and (each.stage, each.microbatch) in before:
                yield each

    def _put_before(self, action: Action, again: Action) -> bool:
        """Move it there, if there is memory for it."""
        moved = [each for each in self._program if each != again]
        moved.insert(moved.index(action), again)
        if self._bytes_in is not None and self._max_bytes is not None:
            most = max(self._bytes_in(tuple(moved)))
            if most > self._max_bytes and most > max(self._bytes_in(tuple(self._program))):
                return False
        self._program = moved
        return True


class _Return:
    """Puts recomputations back where they stood, as long as the step gets no longer.

    Args:
        late: where they stood.
        early: the same schedule with some of them earlier.
        timeline_of: when each action runs.
    """

    def __init__(self, late: Schedule, early: Schedule, timeline_of: Callable[[Schedule], Timeline]) -> None:
        self._schedule, self._timeline_of = early, timeline_of
        self._followers = dict(_followers(late))
        self._limits = _lengths_s(timeline_of(early))

    def done(self) -> Schedule:
        """The schedule when no more can go back; those of a rank are tried together, then in halves."""
        now = dict(_followers(self._schedule))
        moved = {again for again, follower in self._followers.items() if now.get(again) != follower}
        groups = [group for program in self._schedule.programs if (group := [a for a in program if a in moved])]
        while groups:
            group = groups.pop()
            back = self._schedule.with_programs(self._back(program, group) for program in self._schedule.programs)
            if self._is_as_short(back):
                self._schedule = back
            elif len(group) > 1:
                middle = len(group) // 2
                groups += [group[:middle], group[middle:]]
        return self._schedule

    def _is_as_short(self, schedule: Schedule) -> bool:
        lengths_s = _lengths_s(self._timeline_of(schedule))
        return all(one <= limit * (1 + _ROUNDING) for one, limit in zip(lengths_s, self._limits, strict=True))

    def _back(self, program: Program, group: Sequence[Action]) -> Iterator[Action]:
        before: dict[Action, list[Action]] = {}
        for each in group:
            before.setdefault(self._followers[each], []).append(each)
        moving = set(group)
        for action in program:
            yield from before.get(action, ())
            if action not in moving:
                yield action


def _followers(schedule: Schedule) -> Iterator[tuple[Action, Action]]:
    """Per R, the first action after it that is none: its backward, or the pair with it."""
    for program in schedule.programs:
        follower = None
        for action in reversed(program):
            if action.kind is not Kind.RECOMPUTE:
                follower = action
            elif follower is not None:
                yield action, follower


def _lengths_s(timeline: Timeline) -> tuple[float, float]:
    return timeline.makespan_s, timeline.longest_rank_span_s
