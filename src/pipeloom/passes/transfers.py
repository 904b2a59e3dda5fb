"""Transfers as actions: a SEND after what makes a value, a RECV before what needs it.

A channel (an ordered pair of ranks) delivers in order, so the receives of a rank must be posted in the order
in which the other side sends, which need not be the order of their use. The rule: a receive is posted as late
as its consumer and the receives after it on its channel allow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from pipeloom.ir import Action, Kind, Program, Schedule
from pipeloom.ir.relations import counterpart, needs

_SEND_AFTER = {Kind.FORWARD: Kind.SEND_F, Kind.BACKWARD: Kind.SEND_B, Kind.INPUT_GRAD: Kind.SEND_B}


def add_transfers(schedule: Schedule) -> Schedule:
    """Lower a schedule of computations: add SEND and RECV wherever a value changes its rank.

    Two stages on one rank hand over without a transfer. A schedule that has transfers is returned as it is.
    """
    if schedule.is_lowered:
        return schedule
    consumers = _consumers(schedule)
    sent = [tuple(_with_sends(program, consumers)) for program in schedule.programs]
    return schedule.with_programs(_with_receives(schedule, rank, sent, consumers) for rank in range(len(sent)))


def _consumers(schedule: Schedule) -> dict[Action, Action]:
    """Per receive that is due, the action that uses what it brings."""
    found = {}
    for action in schedule:
        for need in needs(action, schedule.num_stages):
            receive = need[0]
            if receive.kind.is_recv and _is_between_ranks(schedule, receive):
                found[receive] = action
    return found


def _is_between_ranks(schedule: Schedule, receive: Action) -> bool:
    return schedule.rank_of(receive.stage) != schedule.rank_of(counterpart(receive).stage)


def _with_sends(program: Program, consumers: dict[Action, Action]) -> Iterator[Action]:
    for action in program:
        yield action
        kind = _SEND_AFTER.get(action.kind)
        send = Action(kind, action.stage, action.microbatch) if kind else None
        if send and counterpart(send) in consumers:
            yield send


def _with_receives(
    schedule: Schedule, rank: int, sent: list[Program], consumers: dict[Action, Action]
) -> Iterator[Action]:
    """The program of ``rank`` with its receives at their places."""
    program = sent[rank]
    posted_before = defaultdict(list)
    for receives in _incoming(schedule, rank, sent):
        for receive, position in zip(receives, _latest_posts(receives, program, consumers), strict=True):
            posted_before[position].append(receive)
    for position, action in enumerate(program):
        yield from posted_before[position]
        yield action


def _incoming(schedule: Schedule, rank: int, sent: list[Program]) -> Iterator[list[Action]]:
    """Per channel into ``rank``, its receives in the order in which they are sent."""
    for program in sent:
        receives = [counterpart(action) for action in program if action.kind.is_send]
        yield [receive for receive in receives if schedule.rank_of(receive.stage) == rank]


def _latest_posts(receives: list[Action], program: Program, consumers: dict[Action, Action]) -> list[int]:
    """Per receive of one channel, the latest position that is before its use and keeps the channel's order."""
    position_of = {action: position for position, action in enumerate(program)}
    latest, positions = len(program), []
    for receive in reversed(receives):
        latest = min(latest, position_of[consumers[receive]])
        positions.append(latest)
    return positions[::-1]
