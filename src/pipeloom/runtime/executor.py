"""One rank: a loop over its program.

torch runs a schedule in a method of 255 lines with an arm per kind, and in a second runtime beside it. Here the
order is the schedule's, what is waited for is the relation's, and what is done is a table's; nothing is decided.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.relations import channel_of, takes
from pipeloom.runtime.control import Control
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
    """

    action: Action
    position: int
    is_received: bool


Step = tuple[Action, tuple[Source, ...]]
"""An action, and from where it takes values over."""


class Plan:
    """A lowered schedule, with what never changes between its steps worked out once.

    Args:
        schedule: with its transfers.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.steps: tuple[tuple[Step, ...], ...] = tuple(_steps(program, schedule) for program in schedule.programs)
        self.channels = frozenset(channel_of(action, schedule) for action in schedule if action.kind.is_send)


def _steps(program: Sequence[Action], schedule: Schedule) -> tuple[Step, ...]:
    positions = {action: position for position, action in enumerate(program)}
    return tuple(
        (action, tuple(Source(each, positions[each], each.kind.is_recv) for each in takes(action, schedule)))
        for action in program
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
    # What comes between two actions delays every rank after this one, and a thread that was woken runs it many times
    # slower than a loop does: so values are found by position, and handlers by code. Enumerations hash in Python.
    made: dict[int, Any] = {}
    starts, ends = (array("d"), array("d")) if trace is None else trace.spans(rank)
    last_seen = control.last_seen
    by_code = {kind.code: handler for kind, handler in handlers.items()}
    for position, (action, sources) in enumerate(plan.steps[rank]):
        if control.is_stopped:
            raise Aborted
        last_seen[rank] = action
        given: tuple[Any, ...] = ()
        if sources:
            given = tuple([transport.take(each) if is_received else made.pop(at) for each, at, is_received in sources])
        if trace is not None:
            starts[position] = clock()
        try:
            made[position] = by_code[action.kind.code](action, given)
        except Aborted:
            raise
        except BaseException as error:
            error.add_note(
                f"raised on rank {rank}, stage {action.stage}, micro-batch {action.microbatch}, action {action}"
            )
            raise
        del given  # or a rank that waits for its next value would keep this one
        if trace is not None:
            ends[position] = clock()
