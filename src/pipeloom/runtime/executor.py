"""One rank: a loop over its program.

torch runs a schedule in a method of 255 lines with an arm per kind, and in a second runtime beside it. Here the
order is the schedule's, what is waited for is the relation's, and what is done is a table's; nothing is decided.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.relations import channel_of, takes
from pipeloom.runtime.control import Control
from pipeloom.runtime.pairs import OverlapFn, run_pair
from pipeloom.runtime.trace import Trace, clock
from pipeloom.runtime.transport.base import Aborted, Transport

Handler = Callable[[Action, tuple[Any, ...]], Any]
"""Does an action with the values that it takes over; returns what it made, None if nobody takes that over."""


class Source(NamedTuple):
    """Where an action takes a value over from.

    Args:
        action: of the same rank, earlier in its program.
        position: where it stands there.
        is_received: the value comes from another rank.
        is_last: nobody takes the value after this.
    """

    action: Action
    position: int
    is_received: bool
    is_last: bool


Step = tuple[Action, tuple[Source, ...]]
"""An action, and from where it takes values over."""


class Plan:
    """A lowered schedule, with what never changes between its steps worked out once.

    Args:
        schedule: with its transfers.
        overlap: runs pairs of actions that overlap; None runs one after the other, as they stand.

    Attributes:
        split: the micro-batches of stages whose backward comes in two halves, and whether the stage's Ws stand in
            another order than its Is.
        recomputed: those whose forward runs again before it.
        channels: pairs of ranks, sender and receiver.
        pairs: per rank, by their positions, what runs an action together with the next one.
    """

    def __init__(self, schedule: Schedule, overlap: OverlapFn | None = None) -> None:
        self.schedule = schedule
        self.steps: tuple[tuple[Step, ...], ...] = tuple(_steps(program, schedule) for program in schedule.programs)
        orders = {half: _orders(schedule, half) for half in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)}
        has_two = {stage: order != orders[Kind.WEIGHT_GRAD][stage] for stage, order in orders[Kind.INPUT_GRAD].items()}
        self.split = {(a.stage, a.microbatch): has_two[a.stage] for a in schedule if a.kind is Kind.INPUT_GRAD}
        self.recomputed = frozenset((a.stage, a.microbatch) for a in schedule if a.kind is Kind.RECOMPUTE)
        self.channels = frozenset(channel_of(action, schedule) for action in schedule if action.kind.is_send)
        self.pairs: tuple[dict[int, OverlapFn], ...] = tuple(
            {} if overlap is None else dict.fromkeys(_pairs(program, schedule), overlap)
            for program in schedule.programs
        )


def _pairs(program: Sequence[Action], schedule: Schedule) -> Iterator[int]:
    return (position for position, pair in enumerate(pairwise(program)) if pair in schedule.overlaps)


def _orders(schedule: Schedule, half: Kind) -> dict[int, list[int]]:
    """Per stage, its micro-batches in the order of their whole backwards and one half of the others."""
    found: dict[int, list[int]] = {}
    for action in schedule:
        if action.kind in (Kind.BACKWARD, half):
            found.setdefault(action.stage, []).append(action.microbatch)
    return found


def _steps(program: Sequence[Action], schedule: Schedule) -> tuple[Step, ...]:
    positions = {action: position for position, action in enumerate(program)}
    taken = [tuple(takes(action, schedule)) for action in program]
    last_taker = {source: taker for taker, sources in zip(program, taken, strict=True) for source in sources}
    return tuple(
        (taker, tuple(Source(each, positions[each], each.kind.is_recv, last_taker[each] is taker) for each in sources))
        for taker, sources in zip(program, taken, strict=True)
    )


def execute(
    plan: Plan,
    rank: int,
    handlers: Mapping[Kind, Handler],
    transport: Transport,
    control: Control,
    trace: Trace | None,
) -> None:
    """Run the program of ``rank`` to its end.

    Raises:
        Aborted: another rank failed, or the user stopped the step.
        BaseException: whatever a handler raised, with a note that names rank, stage, micro-batch and action.
    """
    walk, steps, pairs = _Walk(rank, handlers, transport, trace), plan.steps[rank], plan.pairs[rank]
    last_seen = control.last_seen
    for position, (action, sources) in enumerate(steps):
        if control.is_stopped:
            raise Aborted
        if pairs and position - 1 in pairs:
            continue
        if pairs and position in pairs:
            other = steps[position + 1]
            last_seen[rank] = action if other[0].kind is Kind.FORWARD else other[0]
            walk.run_together(pairs[position], position, (action, sources), other)
            continue
        last_seen[rank] = action
        # Without a name for what is given, or a rank that waits for its next value would keep this one.
        walk.run(position, action, walk.taken(sources) if sources else ())


class _Walk:
    """One rank on its way through its program.

    What comes between two actions delays every rank after this one, and a thread that was woken runs it many times
    slower than a loop does: so values are found by position, and handlers by code. Enumerations hash in Python.
    """

    __slots__ = ("_by_code", "_ends", "_made", "_rank", "_starts", "_transport")

    def __init__(self, rank: int, handlers: Mapping[Kind, Handler], transport: Transport, trace: Trace | None) -> None:
        self._rank = rank
        self._transport = transport
        self._starts: array[float] | None = None
        self._ends: array[float] | None = None
        if trace is not None:
            self._starts, self._ends = trace.spans(rank)
        self._by_code = {kind.code: handler for kind, handler in handlers.items()}
        self._made: dict[int, Any] = {}

    def taken(self, sources: tuple[Source, ...]) -> tuple[Any, ...]:
        """The values that an action takes over; waits for those of other ranks."""
        made, take = self._made, self._transport.take
        return tuple(
            [
                take(each) if is_received else made.pop(at) if is_last else made[at]
                for each, at, is_received, is_last in sources
            ]
        )

    def run(self, position: int, action: Action, given: tuple[Any, ...]) -> None:
        """Run an action, and note when."""
        if self._starts is not None:
            self._starts[position] = clock()
        try:
            self._made[position] = self._by_code[action.kind.code](action, given)
        except Aborted:
            raise
        except BaseException as error:
            error.add_note(
                f"raised on rank {self._rank}, stage {action.stage}, micro-batch {action.microbatch}, action {action}"
            )
            raise
        if self._ends is not None:
            self._ends[position] = clock()

    def run_together(self, overlap: OverlapFn, position: int, first: Step, second: Step) -> None:
        """Run two actions that stand side by side by a function, once both have what they need."""
        values = self.taken(first[1]), self.taken(second[1])
        run_pair(
            overlap,
            (first[0], partial(self.run, position, first[0], values[0])),
            (second[0], partial(self.run, position + 1, second[0], values[1])),
        )
