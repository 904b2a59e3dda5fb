"""What an action waits for: the only place that knows.

torch.distributed.pipelining writes this relation four times, and the copies disagree. Here `verify`, the
passes, the simulator, the drawing and the executor all ask `needs`.

A need is a tuple of alternatives, the most specific first: the first one that the schedule holds is what is
waited for. So one relation serves schedules with transfers and without, with whole and with split backwards,
with recomputation and without.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import assert_never

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.schedule import Schedule

StageKind = tuple[Kind, int]
Need = tuple[StageKind, ...]

F, B, I, R = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.RECOMPUTE  # noqa: E741


def stage_needs(kind: Kind, stage: int, num_stages: int) -> tuple[Need, ...]:
    """What ``kind`` of ``stage`` waits for, always of the same micro-batch.

    Returns:
        One need per thing that is waited for; each a tuple of alternatives ``(kind, stage)``, best first.
    """
    is_first, is_last = stage == 0, stage == num_stages - 1
    upstream: tuple[Need, ...] = () if is_first else (((Kind.RECV_F, stage), (F, stage - 1)),)
    downstream: tuple[Need, ...] = () if is_last else (((Kind.RECV_B, stage), (B, stage + 1), (I, stage + 1)),)
    activations: Need = ((R, stage), (F, stage))
    match kind:
        case Kind.FORWARD:
            return upstream
        case Kind.BACKWARD | Kind.INPUT_GRAD:
            return (activations, *downstream)
        case Kind.WEIGHT_GRAD:
            return (((I, stage),),)
        case Kind.RECOMPUTE | Kind.SEND_F:
            return (((F, stage),),)
        case Kind.SEND_B:
            return (((B, stage), (I, stage)),)
        case Kind.RECV_F:
            return (((Kind.SEND_F, stage - 1),),)
        case Kind.RECV_B:
            return (((Kind.SEND_B, stage + 1),),)
        case _:
            assert_never(kind)


def needs(action: Action, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """`stage_needs` with the micro-batch filled in: per need its alternatives, best first."""
    return tuple(
        tuple(Action(kind, stage, action.microbatch) for kind, stage in need)
        for need in stage_needs(action.kind, action.stage, num_stages)
    )


def resolve(need: tuple[Action, ...], held: Collection[Action]) -> Action | None:
    """The alternative that ``held`` (a schedule's actions) contains, or None if none of them is there."""
    return next((action for action in need if action in held), None)


def waits_for(action: Action, num_stages: int, held: Collection[Action]) -> Iterator[Action]:
    """The actions of a schedule that ``action`` waits for; needs that the schedule lacks are left out."""
    for need in needs(action, num_stages):
        found = resolve(need, held)
        if found is not None:
            yield found


def takes(action: Action, schedule: Schedule) -> Iterator[Action]:
    """The actions of its rank whose values ``action`` takes over; what stays on a stage for its backward is no such.

    Args:
        action: of ``schedule``.
        schedule: with its transfers.
    """
    if action.kind.is_recv:
        return
    for need in waits_for(action, schedule.num_stages, schedule.actions):
        if need.kind.is_recv or action.kind.is_send or need.stage != action.stage:
            yield need


def counterpart(action: Action) -> Action:
    """The other end of a transfer: the receive of a send, the send of a receive.

    Raises:
        KeyError: the action is no transfer.
    """
    kind, step = _COUNTERPARTS[action.kind]
    return Action(kind, action.stage + step, action.microbatch)


def other_stage(transfer: Action) -> int:
    """The stage at the other end of a transfer; for those who have no time to make its `counterpart`."""
    return transfer.stage + _STEPS[transfer.kind.code]


def channel_of(send: Action, schedule: Schedule) -> tuple[int, int]:
    """The ordered pair of ranks, sender and receiver, between which a send travels."""
    return schedule.rank_of(send.stage), schedule.rank_of(counterpart(send).stage)


_COUNTERPARTS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
_STEPS = {kind.code: step for kind, (_, step) in _COUNTERPARTS.items()}
