"""A schedule compiled for simulation: what `relations` says of a stage, resolved once for all micro-batches.

Asking "what does this action wait for" a million times would cost more than the simulation. But the answer is
the same for every micro-batch of a kind and stage, so it is asked once for each of these (`Task`), and an action
becomes a task and a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeloom.cost import Costs
from pipeloom.errors import InvalidSchedule
from pipeloom.ir import Action, Schedule
from pipeloom.ir.relations import Need, Work, stage_needs

SEE_VERIFY = "pipeloom.verify draws every fault of a schedule"
UNFINISHED = -1.0

Times = dict[int, float]
"""Per micro-batch, the second at which something is there; `UNFINISHED` before that is known."""


class Task:
    """One kind of work of one stage (to or from one peer), for all micro-batches.

    Attributes:
        ends: when the action of each micro-batch ends; its keys are the micro-batches that the schedule holds.
        needs: per need, its alternatives: where the time stands, and whose it is.
        messages: what leaves for other ranks when an action ends.
        waiting: per micro-batch, the ranks that stand still until it ends.
    """

    __slots__ = ("duration_s", "ends", "kind", "messages", "needs", "peer", "rank", "replica", "stage", "waiting")

    def __init__(self, work: Work, rank: int, replica: int, duration_s: float) -> None:
        self.kind, self.stage, self.peer = work
        self.rank, self.replica = rank, replica
        self.duration_s = duration_s
        self.ends: Times = {}
        self.needs: list[list[tuple[Times, Task]]] = []
        self.messages: list[Message] = []
        self.waiting: dict[int, list[int]] = {}

    def action(self, microbatch: int) -> Action:
        """The action of one micro-batch."""
        return Action(self.kind, self.stage, microbatch, self.peer)

    def unfinished_need(self, microbatch: int) -> Task | None:
        """The first task that the action waits for and whose time is not known."""
        for need in self.needs:
            times, source = next(((t, s) for t, s in need if microbatch in t), (None, None))
            if times is not None and times[microbatch] == UNFINISHED:
                return source
        return None

    def needed_s(self, microbatch: int) -> Iterator[float]:
        """When each thing that the action waits for is there."""
        return (next(t[microbatch] for t, _ in need if microbatch in t) for need in self.needs)


class Channel:
    """An ordered pair of ranks; with a bandwidth its messages queue."""

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s = 0.0


class Message:
    """What a task sends to another rank: when each micro-batch's value arrives there."""

    __slots__ = ("arrivals", "channel", "latency_s", "occupancy_s")

    def __init__(self, channel: Channel, latency_s: float, occupancy_s: float) -> None:
        self.channel = channel
        self.latency_s = latency_s
        self.occupancy_s = occupancy_s
        self.arrivals: Times = {}

    def arrival_in_queue_s(self, now_s: float) -> float:
        """When a message that is posted now arrives: it leaves after those before it on its channel."""
        self.channel.free_s = max(now_s, self.channel.free_s) + self.occupancy_s
        return self.channel.free_s + self.latency_s


class Tasks:
    """All tasks of a schedule, linked.

    Attributes:
        programs: per rank, the task of each action.
        microbatches: per rank, the micro-batch of each action.
        pairs: per rank, by the position of its first, the position of the second and the seconds of each pair that runs
            as one.

    Raises:
        InvalidSchedule: an action stands twice or on the wrong rank, or nothing in the schedule does what it needs.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule = schedule
        self._costs = costs
        self._tasks: dict[tuple[Work, int], Task] = {}
        self._channels: dict[tuple[int, int], Channel] = {}
        self._messages: dict[tuple[Task, int], Message] = {}
        self._num_of_stages = 0
        self.programs = [self._compiled(rank, program) for rank, program in enumerate(schedule.programs)]
        self.microbatches = [[action.microbatch for action in program] for program in schedule.programs]
        self.pairs = _pairs(schedule, costs)
        if sum(len(task.ends) for task in self._tasks.values()) + self._num_of_stages != len(schedule):
            raise InvalidSchedule(f"schedule {schedule.name!r} does {_first_doubled(schedule)} twice", SEE_VERIFY)
        for task in self._tasks.values():
            self._link(task)
        self._post_messages()
        self._wait_for_messages()

    def _compiled(self, rank: int, program: Sequence[Action]) -> list[Task]:
        # Keyed by the kind's code: an enumeration's own hash is slower than all the rest here.
        own: dict[tuple[int, int, int | None, int], Task] = {}
        row, has_replicas = [], bool(self._schedule.placement.opposed)
        for action in program:
            if action.kind.is_of_stage:  # takes no time, may come several times, and nothing waits for it here
                row.append(Task((action.kind, action.stage, None), rank, 0, 0.0))
                self._num_of_stages += 1
                continue
            replica = self._schedule.replica_of(action.microbatch) if has_replicas else 0
            key = (action.kind.code, action.stage, action.peer, replica)
            task = own.get(key)
            if task is None:
                task = own[key] = self._task(rank, action, replica)
            task.ends[action.microbatch] = UNFINISHED
            row.append(task)
        return row

    def _task(self, rank: int, action: Action, replica: int) -> Task:
        why_misplaced = self._schedule.why_misplaced(rank, action)
        if why_misplaced is not None:
            raise InvalidSchedule(f"schedule {self._schedule.name!r} cannot run: {why_misplaced}", SEE_VERIFY)
        work = (action.kind, action.stage, action.peer)
        duration_s = self._costs.duration_s(action.kind, action.stage)
        task = self._tasks[work, replica] = Task(work, rank, replica, duration_s)
        return task

    def _link(self, task: Task) -> None:
        """Resolve each need, micro-batch by micro-batch, to the first alternative that the schedule holds."""
        for need in self._needs(task):
            unmet = set(task.ends)
            alternatives = []
            for source in filter(None, [self._tasks.get((work, task.replica)) for work in need]):
                met = unmet & source.ends.keys()
                if met:
                    alternatives.append((self._times(source, task, met), source))
                    unmet -= met
            if unmet:
                raise InvalidSchedule(_unmet_text(self._schedule, task.action(min(unmet)), need), SEE_VERIFY)
            task.needs.append(alternatives)

    def _needs(self, task: Task) -> tuple[Need, ...]:
        return stage_needs(task.kind, task.stage, self._schedule.num_stages, self._schedule.links, task.peer)

    def _times(self, source: Task, task: Task, microbatches: set[int]) -> Times:
        """Where a consumer reads when a value is there: its end, or its arrival if it changes its rank."""
        if source.rank == task.rank:
            return source.ends
        arrivals = self._message(source, task).arrivals
        arrivals.update(dict.fromkeys(microbatches, UNFINISHED))
        return arrivals

    def _message(self, source: Task, task: Task) -> Message:
        key = (source, task.stage)
        if key not in self._messages:
            channel = self._channels.setdefault((source.rank, task.rank), Channel())
            occupancy_s = self._costs.occupancy_s(source.stage, task.stage)
            self._messages[key] = Message(channel, self._costs.transfer_s, occupancy_s)
        return self._messages[key]

    def _post_messages(self) -> None:
        """Each leaves when its value is made, those to the nearest stages first, as in a lowered program."""
        for (source, _), message in sorted(self._messages.items(), key=_stages_travelled):
            source.messages.append(message)

    def _wait_for_messages(self) -> None:
        """A receive waits for nothing where it stands; what its message needs, its consumer waits for."""
        for task in self._tasks.values():
            if not task.kind.is_recv:
                task.needs += [need for receive in _receives(task) for need in receive.needs]
        self._arrivals = {task: task.needs for task in self._tasks.values() if task.kind.is_recv}
        for receive in self._arrivals:
            receive.needs = []

    def arrival_s(self, receive: Task, microbatch: int) -> float:
        """When the message of a receive is there."""
        return next(times[microbatch] for need in self._arrivals[receive] for times, _ in need)


def _pairs(schedule: Schedule, costs: Costs) -> list[dict[int, tuple[int, float]]]:
    """Without a cost of its own a pair runs one after the other."""
    if not costs.overlap_s or not schedule.overlaps:
        return [{} for _ in schedule.programs]
    seconds = dict(schedule.overlaps)
    found = []
    for program in schedule.programs:
        position_of = {action: position for position, action in enumerate(program)}
        firsts = [(position, action) for action, position in position_of.items() if action in seconds]
        found.append({at: (position_of[seconds[each]], costs.overlap_s[each.stage]) for at, each in firsts})
    return found


def _stages_travelled(item: tuple[tuple[Task, int], Message]) -> int:
    source, stage = item[0]
    return abs(source.stage - stage)


def _receives(task: Task) -> Iterator[Task]:
    return (source for need in task.needs for _, source in need if source.kind.is_recv)


def _first_doubled(schedule: Schedule) -> Action:
    seen: set[Action] = set()
    # set.add returns None, so this reads: seen before, or else remembered.
    return next(action for action in schedule if action in seen or seen.add(action))  # type: ignore[func-returns-value]


def _unmet_text(schedule: Schedule, action: Action, need: Need) -> str:
    names = " or ".join(str(Action(kind, stage, action.microbatch, peer)) for kind, stage, peer in need)
    return (
        f"schedule {schedule.name!r} cannot run: {action} on rank {schedule.rank_of(action.stage)} waits for "
        f"{names}, which no rank does"
    )
