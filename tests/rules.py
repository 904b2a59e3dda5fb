"""The rules of schedules once more, written differently: as counts and a graph, without asking `pipeloom.ir`.

Every wait becomes an edge. A buffer that is free again when the message before was received is an edge too, so a
schedule can deadlock exactly if the graph has a cycle.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from pipeloom.ir import Action, Kind, Links, Schedule

F, B, I, W, R = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE  # noqa: E741
SEND_F, RECV_F, SEND_B, RECV_B = Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B
Graph = dict[Action, set[Action]]
Channel = tuple[int, int]


def is_right(schedule: Schedule) -> bool:
    """Whether the schedule keeps every rule but those on memory."""
    return is_complete(schedule) and has_matching_transfers(schedule) and can_end(schedule)


def is_complete(schedule: Schedule) -> bool:
    """Every F once, every B or I and W once, at most one R; each on the rank that holds its stage."""
    found = Counter((rank, action) for rank, program in enumerate(schedule.programs) for action in program)
    wanted = [()] if schedule.is_forward_only else [(B,), (I, W)]
    most_recomputes = 0 if schedule.is_forward_only else 1
    for stage, rank in enumerate(schedule.placement.ranks):
        for microbatch in range(schedule.num_microbatches):
            counts = {kind: found.pop((rank, Action(kind, stage, microbatch)), 0) for kind in Kind}
            done = tuple(kind for kind in (B, I, W) for _ in range(counts[kind]))
            is_computed = counts[F] == 1 and done in wanted and counts[R] <= most_recomputes
            is_backward_sent = counts[SEND_B] + counts[RECV_B] > 0
            if not is_computed or max(counts.values()) > 1 or (schedule.is_forward_only and is_backward_sent):
                return False
    skips = {at: count for at, count in found.items() if at[1].peer is not None and at[1].kind in _OTHER}
    ranks = schedule.placement.ranks
    return skips == dict(found) and all(count == 1 and rank == ranks[a.stage] for (rank, a), count in skips.items())


def has_matching_transfers(schedule: Schedule) -> bool:
    """Either no transfer, or one for each value that changes its rank, received in the order in which it is sent."""
    transfers = {action for action in schedule if action.kind in (SEND_F, RECV_F, SEND_B, RECV_B)}
    if not transfers:
        return True
    sends, receives = channels(schedule)
    return transfers == set(due_transfers(schedule)) and sends == receives


def due_transfers(schedule: Schedule) -> Iterator[Action]:
    """Both ends of every value that changes its rank."""
    ranks = schedule.placement.ranks
    for stage in range(len(ranks) - 1):
        for microbatch in range(schedule.num_microbatches if ranks[stage] != ranks[stage + 1] else 0):
            yield Action(SEND_F, stage, microbatch)
            yield Action(RECV_F, stage + 1, microbatch)
            if not schedule.is_forward_only:
                yield Action(SEND_B, stage + 1, microbatch)
                yield Action(RECV_B, stage, microbatch)
    backward = () if schedule.is_forward_only else schedule.links.backward
    for pairs, send, receive in ((schedule.links.forward, SEND_F, RECV_F), (backward, SEND_B, RECV_B)):
        for (source, to), microbatch in itertools.product(pairs, range(schedule.num_microbatches)):
            if ranks[source] != ranks[to]:
                yield Action(send, source, microbatch, to)
                yield Action(receive, to, microbatch, source)


def channels(schedule: Schedule) -> tuple[dict[Channel, list[Action]], dict[Channel, list[Action]]]:
    """Per ordered pair of ranks what is sent, in order, and the sends of what is received, in order."""
    ranks, sends, receives = schedule.placement.ranks, defaultdict(list), defaultdict(list)
    for action in schedule:
        if action.kind in (SEND_F, SEND_B):
            sends[ranks[action.stage], ranks[_other(action).stage]].append(action)
        elif action.kind in (RECV_F, RECV_B):
            receives[ranks[_other(action).stage], ranks[action.stage]].append(_other(action))
    return sends, receives


_OTHER = {SEND_F: (RECV_F, 1), RECV_F: (SEND_F, -1), SEND_B: (RECV_B, -1), RECV_B: (SEND_B, 1)}


def _other(action: Action) -> Action:
    kind, step = _OTHER[action.kind]
    if action.peer is not None:
        return Action(kind, action.peer, action.microbatch, action.stage)
    return Action(kind, action.stage + step, action.microbatch)


def can_end(schedule: Schedule, buffers_per_channel: int = 1) -> bool:
    """Whether the graph of all waits has no cycle."""
    try:
        list(TopologicalSorter(edges(schedule, buffers_per_channel)).static_order())
    except CycleError:
        return False
    return True


def edges(schedule: Schedule, buffers_per_channel: int) -> Graph:
    """Per action, what has to be done before it."""
    held = set(schedule)
    graph: Graph = {
        action: {before for before in (*_values(action, held), *_skips(action, schedule.links, held)) if before in held}
        for action in held
    }
    for program in schedule.programs:
        for before, after in itertools.pairwise(program):
            graph[after].add(before)
    for sends in channels(schedule)[0].values():
        for received, sent in zip(sends, sends[buffers_per_channel:], strict=False):
            graph[sent].add(_other(received))
    return graph


def _values(action: Action, held: set[Action]) -> list[Action]:
    """Whose values the action uses."""

    def of(kind: Kind, step: int = 0) -> Action:
        return Action(kind, action.stage + step, action.microbatch)

    backward = [of(B), of(I)]
    from_before = [of(RECV_F), of(SEND_F, -1)] if of(RECV_F) in held else [of(F, -1)]
    from_after = [of(RECV_B), of(SEND_B, 1)] if of(RECV_B) in held else [of(B, 1), of(I, 1)]
    uses = {
        F: from_before,
        R: [of(F)],
        B: [of(F), of(R), *from_after],
        I: [of(F), of(R), *from_after],
        W: [of(I)],
        SEND_F: [of(F)],
        SEND_B: backward,
    }
    return uses.get(action.kind, [])


def _skips(action: Action, links: Links, held: set[Action]) -> Iterator[Action]:
    """Whose values it uses that skipped stages."""
    is_forward, stage, microbatch = action.kind is F, action.stage, action.microbatch
    receive, send, makers = (RECV_F, SEND_F, [F]) if is_forward else (RECV_B, SEND_B, [B, I])
    pairs = links.forward if is_forward else links.backward if action.kind in (B, I) else ()
    for source in [source for source, to in pairs if to == stage]:
        received = Action(receive, stage, microbatch, source)
        if received in held:
            yield from (received, Action(send, source, microbatch, stage))
        else:
            yield from (Action(kind, source, microbatch) for kind in makers)
