"""When does each action run, if each takes its cost?

The obvious loop looks at all ranks again and again until nothing moves, which is quadratic. Here a rank that
must wait leaves its number with what it waits for and is looked at again when that ends: every action is
touched once, and every wait once.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator

from pipeloom.cost import Costs
from pipeloom.errors import CostError, InvalidSchedule
from pipeloom.ir import Action, Schedule, Timeline
from pipeloom.ir.peaks import peak_activation_bytes
from pipeloom.sim.tasks import SEE_VERIFY, UNFINISHED, Task, Tasks


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Predict when each action runs, every rank in the order of its program, as early as it can.

    A value that changes its rank arrives ``costs.transfer_s`` after its message has left; nobody is occupied
    meanwhile, and without a bandwidth neither is the channel (`pipeloom.cost.Costs`). With transfers in the
    programs or without, the figures are the same: a SEND takes no time, a RECV stands from where it is posted
    until its message is there and never blocks its rank; its consumer waits.

    Args:
        schedule: with transfers or without.
        costs: for as many stages as the schedule has.

    Returns:
        The timeline, from second 0 on, with ``peak_activation_bytes``.

    Raises:
        CostError: the costs are for another number of stages.
        InvalidSchedule: the schedule cannot run; the message says which action waits for what.
    """
    if costs.num_stages != schedule.num_stages:
        raise CostError(
            f"costs of {costs.num_stages} stages were given for a schedule of {schedule.num_stages}; "
            "each stage needs its own",
            "Costs.uniform(num_stages, ...) makes them from single numbers",
        )
    run = _Run(Tasks(schedule, costs), schedule.num_ranks)
    run.to_the_end()
    run.require_end(schedule)
    if schedule.is_lowered:
        run.end_receives()
    held = peak_activation_bytes(schedule, costs) if costs.has_bytes else (0,) * schedule.num_ranks
    return Timeline(schedule, tuple(run.starts), tuple(run.ends), held)


class _Run:
    """The state of one simulation. Each rank is a generator that stands still where it must wait."""

    def __init__(self, tasks: Tasks, num_ranks: int) -> None:
        self.tasks = tasks
        self.starts = [array("d") for _ in range(num_ranks)]
        self.ends = [array("d") for _ in range(num_ranks)]
        self.ready = deque(range(num_ranks))

    def to_the_end(self) -> None:
        """Run every rank as far as it comes."""
        pairs = self.tasks.pairs
        ranks = [self._steps_in_pairs(rank) if pairs[rank] else self._steps(rank) for rank in range(len(self.ends))]
        while self.ready:
            next(ranks[self.ready.popleft()], None)

    def _steps(self, rank: int) -> Iterator[None]:
        """Run one rank; stop where it must wait. The inner loop: locals and plain tests, on purpose."""
        starts, ends, clock = self.starts[rank], self.ends[rank], 0.0
        for task, microbatch in zip(self.tasks.programs[rank], self.tasks.microbatches[rank], strict=True):
            start = clock
            for need in task.needs:
                for times, source in need:
                    time = times.get(microbatch)
                    if time is None:
                        continue
                    if time == UNFINISHED:
                        source.waiting.setdefault(microbatch, []).append(rank)
                        yield
                        time = times[microbatch]
                    if time > start:
                        start = time
                    break
            clock = task.ends[microbatch] = start + task.duration_s
            starts.append(start)
            ends.append(clock)
            for message in task.messages:
                message.arrivals[microbatch] = (
                    message.arrival_in_queue_s(clock) if message.occupancy_s else clock + message.latency_s
                )
            if microbatch in task.waiting:
                self.ready.extend(task.waiting.pop(microbatch))

    def _steps_in_pairs(self, rank: int) -> Iterator[None]:
        """The same for a rank that runs some pairs as one: these start when both can, and end together."""
        starts, ends, clock = self.starts[rank], self.ends[rank], 0.0
        program = list(zip(self.tasks.programs[rank], self.tasks.microbatches[rank], strict=True))
        while len(ends) < len(program):
            position = len(ends)
            last, pair_s = self.tasks.pairs[rank].get(position, (position, program[position][0].duration_s))
            together = program[position : last + 1]
            for task, microbatch in together[1:-1]:
                if task.kind.is_recv:  # posted with the first; the second may wait for its message
                    self._finish(task, microbatch, clock)
            for task, microbatch in (together[0], together[-1]):
                while (source := task.unfinished_need(microbatch)) is not None:
                    source.waiting.setdefault(microbatch, []).append(rank)
                    yield
                clock = max([clock, *task.needed_s(microbatch)])
            start, clock = clock, clock + pair_s
            for task, microbatch in together:  # what is sent or received between the two is done when they are
                starts.append(clock if task.kind.is_send else start)
                ends.append(start if task.kind.is_recv else clock)
                if microbatch not in task.ends or task.ends[microbatch] == UNFINISHED:
                    self._finish(task, microbatch, clock)

    def _finish(self, task: Task, microbatch: int, end_s: float) -> None:
        task.ends[microbatch] = end_s
        for message in task.messages:
            message.arrivals[microbatch] = message.arrival_in_queue_s(end_s)
        self.ready.extend(task.waiting.pop(microbatch, ()))

    def require_end(self, schedule: Schedule) -> None:
        """Raise `InvalidSchedule` if a rank never got to its end."""
        stuck = [rank for rank in range(len(self.ends)) if len(self.ends[rank]) < len(schedule.program(rank))]
        if stuck:
            ring = self._ring(stuck[0])
            text = "; ".join(f"rank {rank} stands at {action} and waits for {source}" for rank, action, source in ring)
            raise InvalidSchedule(
                f"schedule {schedule.name!r} cannot run: {text}, which comes later",
                SEE_VERIFY,
            )

    def _ring(self, rank: int) -> list[tuple[int, Action, Action]]:
        """Follow who waits for whom until a rank comes again; what led into the ring is cut off."""
        chain: dict[int, tuple[int, Action, Action]] = {}
        while rank not in chain:
            position = len(self.ends[rank])
            task, microbatch = self.tasks.programs[rank][position], self.tasks.microbatches[rank][position]
            source = task.unfinished_need(microbatch)
            if source is None:  # the second of a pair is what cannot start
                position, _ = self.tasks.pairs[rank][position]
                task, microbatch = self.tasks.programs[rank][position], self.tasks.microbatches[rank][position]
                source = task.unfinished_need(microbatch)
            assert source is not None, "a rank stands still only for something that is not finished"
            chain[rank] = (rank, task.action(microbatch), source.action(microbatch))
            rank = source.rank
        ring = list(chain.values())
        return ring[list(chain).index(rank) :]

    def end_receives(self) -> None:
        """A receive ends when its message is there, which no rank had to know when it was posted."""
        for rank, program in enumerate(self.tasks.programs):
            for position, task in enumerate(program):
                if task.kind.is_recv:
                    arrival_s = self.tasks.arrival_s(task, self.tasks.microbatches[rank][position])
                    self.ends[rank][position] = max(self.starts[rank][position], arrival_s)
