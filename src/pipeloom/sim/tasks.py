"""A schedule compiled for simulation: what `relations` says of a stage, resolved once for all micro-batches.

Asking "what does this action wait for" a million times would cost more than the simulation. But the answer is
the same for every micro-batch of a kind and stage, so it is asked once for each of these (`Task`), and an action
becomes a task and a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeloom.cost import Costs
from pipeloom.errors import InvalidSchedule
from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.relations import Need, stage_needs

SEE_VERIFY = "pipeloom.verify draws every fault of a schedule"
UNFINISHED = -1.0

Times = dict[int, float]
"""Per micro-batch, the second at which something is there; `UNFINISHED` before that is known."""


class Task:
    """One kind of work of one stage, for all micro-batches.

    Attributes:
        ends: when the action of each micro-batch ends; its keys are the micro-batches that the schedule holds.
        needs: per need, its alternatives: where the time stands, and whose it is.
        messages: what leaves for other ranks when an action ends.
        waiting: per micro-batch, the ranks that stand still until it ends.
    """

    __slots__ = ("duration_s", "ends", "kind", "messages", "needs", "rank", "stage", "waiting")

    def __init__(self, kind: Kind, stage: int, rank: int, duration_s: float) -> None:
        self.kind = kind
        self.stage = stage
        self.rank = rank
        self.duration_s = duration_s
        self.ends: Times = {}
        self.needs: list[list[tuple[Times, Task]]] = []
        self.messages: list[Message] = []
        self.waiting: dict[int, list[int]] = {}

    def action(self, microbatch: int) -> Action:
        """The action of one micro-batch."""
        return Action(self.kind, self.stage, microbatch)

    def unfinished_need(self, microbatch: int) -> Task | None:
        """The first task that the action waits for and whose time is not known."""
        for need in self.needs:
            times, source = next(((t, s) for t, s in need if microbatch in t), (None, None))
            if times is not None and times[microbatch] == UNFINISHED:
                return source
        return None


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

    Raises:
        InvalidSchedule: an action stands twice or on the wrong rank, or nothing in the schedule does what it needs.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule = schedule
        self._costs = costs
        self._tasks: dict[tuple[Kind, int], Task] = {}
        self._channels: dict[tuple[int, int], Channel] = {}
        self._messages: dict[tuple[Task, int], Message] = {}
        self.programs = [self._compiled(rank, program) for rank, program in enumerate(schedule.programs)]
        self.microbatches = [[action.microbatch for action in program] for program in schedule.programs]
        if sum(len(task.ends) for task in self._tasks.values()) != len(schedule):
            raise InvalidSchedule(f"schedule {schedule.name!r} does {_first_doubled(schedule)} twice", SEE_VERIFY)
        for task in self._tasks.values():
            self._link(task)
        self._wait_for_messages()

    def _compiled(self, rank: int, program: Sequence[Action]) -> list[Task]:
        # Keyed by the kind's code: an enumeration's own hash is slower than all the rest here.
        own: dict[tuple[int, int], Task] = {}
        row = []
        for action in program:
            key = (action.kind.code, action.stage)
            task = own.get(key)
            if task is None:
                task = own[key] = self._task(rank, action)
            task.ends[action.microbatch] = UNFINISHED
            row.append(task)
        return row

    def _task(self, rank: int, action: Action) -> Task:
        why_misplaced = self._schedule.why_misplaced(rank, action)
        if why_misplaced is not None:
            raise InvalidSchedule(f"schedule {self._schedule.name!r} cannot run: {why_misplaced}", SEE_VERIFY)
        kind, stage = action.kind, action.stage
        task = self._tasks[(kind, stage)] = Task(kind, stage, rank, self._costs.duration_s(kind, stage))
        return task

    def _link(self, task: Task) -> None:
        """Resolve each need, micro-batch by micro-batch, to the first alternative that the schedule holds."""
        for need in stage_needs(task.kind, task.stage, self._schedule.num_stages):
            unmet = set(task.ends)
            alternatives = []
            for source in filter(None, map(self._tasks.get, need)):
                met = unmet & source.ends.keys()
                if met:
                    alternatives.append((self._times(source, task, met), source))
                    unmet -= met
            if unmet:
                raise InvalidSchedule(_unmet_text(self._schedule, task.action(min(unmet)), need), SEE_VERIFY)
            task.needs.append(alternatives)

    def _times(self, source: Task, task: Task, microbatches: set[int]) -> Times:
        """Where a consumer reads when a value is there: its end, or its arrival if it changes its rank."""
        if source.rank == task.rank:
            return source.ends
        arrivals = self._message(source, task).arrivals
        arrivals.update(dict.fromkeys(microbatches, UNFINISHED))
        return arrivals

    def _message(self, source: Task, task: Task) -> Message:
        key = (source, task.rank)
        if key not in self._messages:
            channel = self._channels.setdefault((source.rank, task.rank), Channel())
            occupancy_s = self._costs.occupancy_s(source.stage, task.stage)
            self._messages[key] = Message(channel, self._costs.transfer_s, occupancy_s)
            source.messages.append(self._messages[key])
        return self._messages[key]

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


def _receives(task: Task) -> Iterator[Task]:
    return (source for need in task.needs for _, source in need if source.kind.is_recv)


def _first_doubled(schedule: Schedule) -> Action:
    seen: set[Action] = set()
    # set.add returns None, so this reads: seen before, or else remembered.
    return next(action for action in schedule if action in seen or seen.add(action))  # type: ignore[func-returns-value]


def _unmet_text(schedule: Schedule, action: Action, need: Need) -> str:
    names = " or ".join(str(Action(kind, stage, action.microbatch)) for kind, stage in need)
    return (
        f"schedule {schedule.name!r} cannot run: {action} on rank {schedule.rank_of(action.stage)} waits for "
        f"{names}, which no rank does"
    )
