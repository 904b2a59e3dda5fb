"""Transfers as actions: a SEND after what makes a value, a RECV before what needs it.

A channel (an ordered pair of ranks) delivers in order, so the receives of a rank must be posted in the order
in which the other side sends, which need not be the order of their use. The rule: a receive is posted as late
as its consumer, the receives after it on its channel, and progress under one buffered message per channel (contract
18) allow. Late, because a posted receive takes up a buffer; but two ranks that both send before they receive, as
interleaved 1F1B makes them, would wait for each other for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from pipeloom.ir import Action, Program, Schedule
from pipeloom.ir.progress import Run
from pipeloom.ir.relations import channel_of, counterpart, needs, other_stage, waits_for


def add_transfers(schedule: Schedule) -> Schedule:
    """Lower a schedule of computations: add SEND and RECV wherever a value changes its rank.

    Two stages on one rank hand over without a transfer, over links (`pipeloom.ir.Links`) as along the chain. A schedule
    that has transfers is returned as it is.

    Args:
        schedule: a valid one; if it runs to its end without transfers, so it does with them.
    """
    if schedule.is_lowered:
        return schedule
    consumers = _consumers(schedule)
    sends = _sends(schedule, consumers)
    sent = [tuple(_with_sends(program, sends)) for program in schedule.programs]
    late = schedule.with_programs(_with_receives(schedule, rank, sent, consumers) for rank in range(len(sent)))
    return _posted_in_time(late)


def without_transfers(schedule: Schedule) -> Schedule:
    """Leave sends and receives out; computations, and what is done with parameters, stay in their order."""
    return schedule.with_programs(
        (action for action in program if not action.kind.is_transfer) for program in schedule.programs
    )


def _consumers(schedule: Schedule) -> dict[Action, Action]:
    """Per receive that is due, the action that uses what it brings."""
    found = {}
    for action in schedule:
        for need in needs(action, schedule):
            receive = need[0]
            if receive.kind.is_recv and _is_between_ranks(schedule, receive):
                found[receive] = action
    return found


def _is_between_ranks(schedule: Schedule, receive: Action) -> bool:
    other = counterpart(receive)
    return schedule.rank_of(receive.stage, receive.microbatch) != schedule.rank_of(other.stage, other.microbatch)


def _sends(schedule: Schedule, receives: Iterable[Action]) -> dict[Action, list[Action]]:
    """Per action that makes a value for other ranks, the sends that follow it: to the nearest stage first."""
    sends = defaultdict(list)
    for send in sorted(map(counterpart, receives), key=_distance):
        for made_by in waits_for(send, schedule):
            sends[made_by].append(send)
    return sends


def _distance(transfer: Action) -> int:
    return abs(transfer.stage - other_stage(transfer))


def _with_sends(program: Program, sends: dict[Action, list[Action]]) -> Iterator[Action]:
    for action in program:
        yield action
        yield from sends.get(action, ())


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
        yield [receive for receive in receives if schedule.rank_of(receive.stage, receive.microbatch) == rank]


def _latest_posts(receives: list[Action], program: Program, consumers: dict[Action, Action]) -> list[int]:
    """Per receive of one channel, the latest position that is before its use and keeps the channel's order."""
    position_of = {action: position for position, action in enumerate(program)}
    latest, positions = len(program), []
    for receive in reversed(receives):
        latest = min(latest, position_of[consumers[receive]])
        positions.append(latest)
    return positions[::-1]


def _posted_in_time(schedule: Schedule) -> Schedule:
    """Run it under one message per channel; where all wait, post the receive that a blocked send waits for."""
    run = Run(schedule, buffers_per_channel=1)
    while blocked := [stuck.action for stuck in run.to_the_end() if stuck.waits_for is None]:
        channel = channel_of(blocked[0], schedule)
        program, position = run.programs[channel[1]], run.positions[channel[1]]
        place = next(place for place in range(position, len(program)) if _arrives_by(program[place], channel, schedule))
        program.insert(position, program.pop(place))
    return schedule.with_programs(run.programs)


def _arrives_by(action: Action, channel: tuple[int, int], schedule: Schedule) -> bool:
    return action.kind.is_recv and channel_of(counterpart(action), schedule) == channel
