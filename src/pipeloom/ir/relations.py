"""What an action waits for: the only place that knows.

torch.distributed.pipelining writes this relation four times, and the copies disagree. Here `verify`, the
passes, the simulator, the drawing and the executor all ask `needs`.

A need is a tuple of alternatives, the most specific first: the first one that the schedule holds is what is
waited for. So one relation serves schedules with transfers and without, with whole and with split backwards,
with recomputation and without.

Stages form a chain with links that skip (`pipeloom.ir.Links`). Which stages a stage takes values from, and where its
own go, is `sources_of` and `destinations_of`; all else follows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import assert_never

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.links import NO_LINKS, Links
from pipeloom.ir.schedule import Schedule

Work = tuple[Kind, int, int | None]
"""What is done for every micro-batch: kind, stage and peer."""
Need = tuple[Work, ...]

F, B, I, R = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.RECOMPUTE  # noqa: E741


def sources_of(kind: Kind, stage: int, num_stages: int, links: Links) -> tuple[int, ...]:
    """The stages whose values F, or else B or I, of ``stage`` takes over: the neighbour, then links by stage."""
    neighbour, skips = (stage - 1, links.forward) if kind is F else (stage + 1, links.backward)
    nearest = (neighbour,) if 0 <= neighbour < num_stages else ()
    return (*nearest, *[source for source, to in skips if to == stage]) if skips else nearest


def destinations_of(kind: Kind, stage: int, num_stages: int, links: Links) -> tuple[int, ...]:
    """The stages that take over what F, or else B or I, of ``stage`` made: the nearest first, which runs first."""
    neighbour, skips = (stage + 1, links.forward) if kind is F else (stage - 1, links.backward[::-1])
    nearest = (neighbour,) if 0 <= neighbour < num_stages else ()
    return (*nearest, *[to for source, to in skips if source == stage]) if skips else nearest


def stage_needs(
    kind: Kind, stage: int, num_stages: int, links: Links = NO_LINKS, peer: int | None = None
) -> tuple[Need, ...]:
    """What ``kind`` of ``stage`` (to or from ``peer``) waits for, always of the same micro-batch.

    Returns:
        One need per thing that is waited for; each a tuple of alternatives ``(kind, stage, peer)``, best first.
    """
    match kind:
        case Kind.FORWARD:
            return _values_needed(stage, Kind.RECV_F, (F,), sources_of(kind, stage, num_stages, links))
        case Kind.BACKWARD | Kind.INPUT_GRAD:
            activations: Need = ((R, stage, None), (F, stage, None))
            sources = sources_of(kind, stage, num_stages, links)
            return (activations, *_values_needed(stage, Kind.RECV_B, (B, I), sources))
        case Kind.WEIGHT_GRAD:
            return (((I, stage, None),),)
        case Kind.UPDATE:
            return (((B, stage, None), (Kind.WEIGHT_GRAD, stage, None)),)
        case Kind.RECOMPUTE | Kind.SEND_F:
            return (((F, stage, None),),)
        case Kind.SEND_B:
            return (((B, stage, None), (I, stage, None)),)
        case Kind.RECV_F | Kind.RECV_B:
            return ((_other_end(kind, stage, peer),),)
        case Kind.UNSHARD | Kind.RESHARD | Kind.REDUCE_GRAD:
            return ()  # of all micro-batches; `verify` checks their places
        case _:
            assert_never(kind)


def _values_needed(stage: int, receive: Kind, made_by: tuple[Kind, ...], sources: tuple[int, ...]) -> tuple[Need, ...]:
    return tuple(
        ((receive, stage, _peer(stage, source)), *((kind, source, None) for kind in made_by)) for source in sources
    )


def _peer(stage: int, other: int) -> int | None:
    """How a transfer names the stage at its other end."""
    return None if abs(stage - other) == 1 else other


def needs(action: Action, schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """`stage_needs` with the micro-batch filled in: per need its alternatives, best first."""
    return tuple(
        tuple(Action(kind, stage, action.microbatch, peer) for kind, stage, peer in need)
        for need in stage_needs(action.kind, action.stage, schedule.num_stages, schedule.links, action.peer)
    )


def resolve(need: tuple[Action, ...], held: Collection[Action]) -> Action | None:
    """The alternative that ``held`` (a schedule's actions) contains, or None if none of them is there."""
    return next((action for action in need if action in held), None)


def waits_for(action: Action, schedule: Schedule) -> Iterator[Action]:
    """The actions of a schedule that ``action`` waits for; needs that the schedule lacks are left out."""
    for need in needs(action, schedule):
        found = resolve(need, schedule.actions)
        if found is not None:
            yield found


def takes(action: Action, schedule: Schedule) -> Iterator[Action]:
    """The actions of its rank whose values ``action`` takes over; what stays on a stage for its backward is no such.

    F, and B or I, take them in the order of `sources_of`.

    Args:
        action: of ``schedule``.
        schedule: with its transfers.
    """
    if action.kind.is_recv:
        return
    for need in waits_for(action, schedule):
        if need.kind.is_recv or action.kind.is_send or need.stage != action.stage:
            yield need


def counterpart(action: Action) -> Action:
    """The other end of a transfer: the receive of a send, the send of a receive.

    Raises:
        KeyError: the action is no transfer.
    """
    kind, stage, peer = _other_end(action.kind, action.stage, action.peer)
    return Action(kind, stage, action.microbatch, peer)


def _other_end(kind: Kind, stage: int, peer: int | None) -> Work:
    other, step = _COUNTERPARTS[kind]
    return (other, stage + step, None) if peer is None else (other, peer, stage)


def other_stage(transfer: Action) -> int:
    """The stage at the other end of a transfer; for those who have no time to make its `counterpart`."""
    return transfer.stage + _STEPS[transfer.kind.code] if transfer.peer is None else transfer.peer


def channel_of(send: Action, schedule: Schedule) -> tuple[int, int]:
    """The ordered pair of ranks, sender and receiver, between which a send travels."""
    return schedule.rank_of(send.stage, send.microbatch), schedule.rank_of(other_stage(send), send.microbatch)


_COUNTERPARTS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
_STEPS = {kind.code: step for kind, (_, step) in _COUNTERPARTS.items()}
