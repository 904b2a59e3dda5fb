"""One rank: a loop over its program.

torch runs a schedule in a method of 255 lines with an arm per kind, and in a second runtime beside it. Here the
order is the schedule's, what is waited for is the relation's, and what is done is a table's; nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.relations import channel_of
from pipeloom.ir.slots import receives_used_by
from pipeloom.runtime.control import Control
from pipeloom.runtime.trace import Trace, clock
from pipeloom.runtime.transport.base import Aborted, Transport

Handler = Callable[[Action, tuple[Any, ...]], None]
Step = tuple[Action, tuple[Action, ...]]


class Plan:
    """A lowered schedule, with what never changes between its steps worked out once.

    Args:
        schedule: with its transfers.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.steps: tuple[tuple[Step, ...], ...] = tuple(
            tuple((action, tuple(receives_used_by(action, schedule))) for action in program)
            for program in schedule.programs
        )
        self.channels = frozenset(channel_of(action, schedule) for action in schedule if action.kind.is_send)


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
    for position, (action, receives) in enumerate(plan.steps[rank]):
        control.check(rank, action)
        arrived = tuple(transport.take(receive) for receive in receives)
        start_s = clock()
        try:
            handlers[action.kind](action, arrived)
        except Aborted:
            raise
        except BaseException as error:
            error.add_note(
                f"raised on rank {rank}, stage {action.stage}, micro-batch {action.microbatch}, action {action}"
            )
            raise
        if trace is not None:
            trace.record(rank, position, start_s, clock())
