"""Does a schedule run to its end? Posts and waits without times, under bounded buffering.

The rules of contract 18: a SEND posts and returns, unless its channel (an ordered pair of ranks) already buffers
as many messages as it may; a RECV is posted at its place and waited for by its consumer; a channel delivers in
order. A schedule that ends under one buffered message per channel cannot deadlock on ordered pairwise channels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from pipeloom.ir.action import Action
from pipeloom.ir.relations import channel_of, counterpart, waits_for
from pipeloom.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that cannot go on: where it stands, and for what it waits (None: for room in its channel)."""

    rank: int
    position: int
    action: Action
    waits_for: Action | None


def stuck_ranks(schedule: Schedule, buffers_per_channel: int = 1) -> tuple[Stuck, ...]:
    """Run the schedule without times; return the ranks that never reach their end, none if all do."""
    return Run(schedule, buffers_per_channel).to_the_end()


def buffers_needed(schedule: Schedule) -> int | None:
    """The fewest messages per channel that must be buffered for the schedule to end; None if none suffice."""
    if stuck_ranks(schedule, len(schedule)):
        return None
    # More buffers never stop a schedule that ends with fewer, so the count can be bisected.
    counts = range(1, len(schedule) + 1)
    return counts[bisect_left(counts, True, key=lambda count: not stuck_ranks(schedule, count))] if counts else 1


class Run:
    """A run of a schedule without times, as far as it comes.

    Args:
        schedule: what is run.
        buffers_per_channel: messages that a channel buffers.

    Attributes:
        programs: what each rank does; what is not yet run may be reordered between two calls of `to_the_end`.
        positions: per rank, how much of it is done.
    """

    def __init__(self, schedule: Schedule, buffers_per_channel: int) -> None:
        self.schedule = schedule
        self.buffers_per_channel = buffers_per_channel
        self.programs = [list(program) for program in schedule.programs]
        self.positions = [0] * schedule.num_ranks
        self.done: set[Action] = set()
        self.buffered: Counter[tuple[int, int]] = Counter()

    def to_the_end(self) -> tuple[Stuck, ...]:
        """Go on until no rank can; return the ranks that have not ended."""
        while any([self.advance(rank) for rank in range(self.schedule.num_ranks)]):
            pass
        return tuple(self.stuck(rank) for rank in range(self.schedule.num_ranks) if self.action_at(rank))

    def advance(self, rank: int) -> bool:
        """Run ``rank`` as far as it comes; whether it came any further."""
        before = self.positions[rank]
        while (action := self.action_at(rank)) and self.is_ready(action):
            self.finish(action)
            self.positions[rank] += 1
        return self.positions[rank] > before

    def action_at(self, rank: int) -> Action | None:
        """What ``rank`` does next; None at its end."""
        program, position = self.programs[rank], self.positions[rank]
        return program[position] if position < len(program) else None

    def is_ready(self, action: Action) -> bool:
        """Whether the rank of ``action``, which stands before it, can do it."""
        if action.kind.is_recv:
            return True
        if action.kind.is_send and self.is_full(action):
            return False
        return self.missing(action) is None

    def is_full(self, send: Action) -> bool:
        """Whether a send has to wait for room in its channel."""
        is_taken = counterpart(send) in self.done
        return not is_taken and self.buffered[channel_of(send, self.schedule)] >= self.buffers_per_channel

    def missing(self, action: Action) -> Action | None:
        """The first thing that ``action`` waits for and that has not happened."""
        for need in waits_for(action, self.schedule):
            if need not in self.done or (need.kind.is_recv and counterpart(need) not in self.done):
                return need
        return None

    def finish(self, action: Action) -> None:
        """Note that it happened; a message is buffered while it is sent and its receive is not posted."""
        if action.kind.is_send and counterpart(action) not in self.done:
            self.buffered[channel_of(action, self.schedule)] += 1
        if action.kind.is_recv and counterpart(action) in self.done:
            self.buffered[channel_of(counterpart(action), self.schedule)] -= 1
        self.done.add(action)

    def stuck(self, rank: int) -> Stuck:
        """Where ``rank`` stands, short of its end."""
        position = self.positions[rank]
        action = self.programs[rank][position]
        return Stuck(rank, position, action, self.missing(action))
