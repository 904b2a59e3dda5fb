"""Is a schedule right? Every rule that a schedule must keep, checked before anything runs.

torch's validator counts in sets, so a doubled action passes. Here each fault is a `Violation` that names rank,
position and action, and draws the rank's program with the place marked.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pipeloom.errors import CostError, InvalidSchedule
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.peaks import HeldBytes, peak_activation_bytes, peak_held_to_input_grad
from pipeloom.ir.progress import Stuck, buffers_needed, stuck_ranks
from pipeloom.ir.relations import counterpart, needs, resolve
from pipeloom.ir.schedule import Program, Schedule
from pipeloom.ir.stage_rules import faults_of_overlaps, faults_of_stage_kinds
from pipeloom.ir.update_rules import faults_of_updates, missing_updates

_NEIGHBOURS = 4
_MOST_SHOWN = 10


class Fault(enum.Enum):
    """The kinds of violation."""

    MISSING = "missing action"
    DOUBLED = "doubled action"
    MISPLACED = "misplaced action"
    BACKWARDS = "dependency backwards"
    DEADLOCK = "deadlock"
    UNMATCHED = "unmatched transfer"
    OVERLAP = "impossible overlap"
    VERSION = "wrong weight version"
    OVER_LIMIT = "peak above the limit"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule.

    Args:
        fault: which rule.
        rank: whose program.
        position: index in that program; None where nothing stands that should.
        action: what is wrong, or missing; None for a peak.
        message: what is wrong and why.
        picture: the rank's program around the place, with a mark under it.
    """

    fault: Fault
    rank: int
    position: int | None
    action: Action | None
    message: str
    picture: str

    def __str__(self) -> str:
        return f"{self.fault.value}: {self.message}\n{self.picture}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rank may hold.

    Args:
        held_to_input_grad: micro-batches (of stages) between F and I at most.
        activation_bytes: bytes at most; needs ``held``.
        held: what one micro-batch holds on each stage; `pipeloom.cost.Costs` is one.

    Raises:
        CostError: a limit of bytes without ``held``, which could never be exceeded.
    """

    held_to_input_grad: int | None = None
    activation_bytes: int | None = None
    held: HeldBytes | None = None

    def __post_init__(self) -> None:
        if self.activation_bytes is not None and self.held is None:
            raise CostError(
                f"a limit of {self.activation_bytes} bytes was given without what a micro-batch holds on each stage",
                "pass held=, for instance a pipeloom.cost.Costs",
            )


def verify(schedule: Schedule, limits: Limits | None = None) -> list[Violation]:
    """Check a schedule, with transfers or without.

    Every F stands once on the rank of its stage, and so does B, or I and W; nothing waits for something later;
    transfers match and keep their order; it ends with one message buffered per channel (contract 18); a stage
    computes only where its parameters are there, and reduces its gradients after the last; what overlaps stands side
    by side; where weights are updated, all stages do so after the same micro-batches, each from their gradients alone,
    and a forward uses a version that is there; peaks stay under the limits (contract 17). Order, versions and limits
    are looked at only where every action stands once at its place: before, they would name what is not wrong.

    Returns:
        The violations, in that order; none for a right schedule.
    """
    placed = [*_misplaced(schedule), *_doubled(schedule), *_missing(schedule), *_overlaps(schedule)]
    return placed or [*_order(schedule), *_over_limits(schedule, limits or Limits())]


def require_valid(schedule: Schedule, limits: Limits | None = None) -> Schedule:
    """Return the schedule if it is right.

    Raises:
        InvalidSchedule: it is not; the message holds the first violations, and how many there are.
    """
    violations = verify(schedule, limits)
    if violations:
        shown = [str(violation) for violation in violations[:_MOST_SHOWN]]
        shown += [f"… and {len(violations) - _MOST_SHOWN} more"] if len(violations) > _MOST_SHOWN else []
        rules = "a rule" if len(violations) == 1 else f"{len(violations)} rules"
        raise InvalidSchedule("\n".join([f"schedule {schedule.name!r} breaks {rules}:", *shown]))
    return schedule


def _order(schedule: Schedule) -> list[Violation]:
    """Deadlock is looked for only where each rank by itself, and each channel, is in order."""
    return [*_backwards(schedule), *_unmatched(schedule)] or [*_versions(schedule), *_deadlocks(schedule)]


def _misplaced(schedule: Schedule) -> Iterator[Violation]:
    for rank, program in enumerate(schedule.programs):
        for position, action in enumerate(program):
            why = schedule.why_misplaced(rank, action)
            if why:
                yield _at(Fault.MISPLACED, schedule, rank, position, why)
        for position, why in faults_of_stage_kinds(program):
            yield _at(Fault.MISPLACED, schedule, rank, position, why)


def _versions(schedule: Schedule) -> Iterator[Violation]:
    for rank, position, why in faults_of_updates(schedule):
        yield _at(Fault.VERSION, schedule, rank, position, why)


def _overlaps(schedule: Schedule) -> Iterator[Violation]:
    for rank, position, why in faults_of_overlaps(schedule):
        yield _at(Fault.OVERLAP, schedule, rank, position, why)


def _doubled(schedule: Schedule) -> Iterator[Violation]:
    for rank, program in enumerate(schedule.programs):
        done: set[Action] = set()
        for position, action in enumerate(program):
            if action.kind.is_of_stage:  # parameters may come and go several times
                continue
            parts = [replace(action, kind=kind) for kind in _halves(action.kind)]
            again = [part for part in parts if part in done]
            if again:
                a_part = "" if len(again) == len(parts) else f" in part, as {again[0]}"
                yield _at(Fault.DOUBLED, schedule, rank, position, f"{action} was done before{a_part}")
            done.update(parts)


def _halves(kind: Kind) -> tuple[Kind, ...]:
    return (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) if kind is Kind.BACKWARD else (kind,)


def _missing(schedule: Schedule) -> Iterator[Violation]:
    done = {(kind, a.stage, a.microbatch) for a in schedule.actions for kind in _halves(a.kind)}
    due = (Kind.FORWARD,) if schedule.is_forward_only else (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            absent = [kind for kind in due if (kind, stage, microbatch) not in done]
            for kind in _joined(absent):
                action = Action(kind, stage, microbatch)
                rank = schedule.rank_of(stage, microbatch)
                yield _absent(Fault.MISSING, schedule, rank, action, f"{action} is missing on rank {rank}")
    for action, why in missing_updates(schedule):
        yield _absent(Fault.MISSING, schedule, schedule.rank_of(action.stage), action, why)


def _joined(kinds: list[Kind]) -> list[Kind]:
    """A backward that is missing as a whole is one fault, not two."""
    halves = list(_halves(Kind.BACKWARD))
    return [*kinds[:-2], Kind.BACKWARD] if kinds[-2:] == halves else kinds


def _backwards(schedule: Schedule) -> Iterator[Violation]:
    for rank, program in enumerate(schedule.programs):
        position_of = {action: position for position, action in enumerate(program)}
        for position, action in enumerate(program):
            for need in needs(action, schedule):
                found = resolve(need, schedule.actions)
                if found is not None and position_of.get(found, -1) > position:
                    why = f"{action} stands before {found}, which it needs"
                    yield _at(Fault.BACKWARDS, schedule, rank, position, why)


def _unmatched(schedule: Schedule) -> Iterator[Violation]:
    yield from _ends_missing(schedule)
    sends, receives = _by_channel(schedule, is_send=True), _by_channel(schedule, is_send=False)
    for channel in sorted(sends.keys() & receives.keys()):
        sent = [counterpart(action) for action in sends[channel]]
        received = receives[channel]
        if sorted(map(str, sent)) == sorted(map(str, received)) and sent != received:
            wrong = next(got for got, due in zip(received, sent, strict=True) if got != due)
            rank = channel[1]
            why = f"{wrong} is posted out of the order in which rank {channel[0]} sends"
            yield _at(Fault.UNMATCHED, schedule, rank, schedule.program(rank).index(wrong), why)


def _ends_missing(schedule: Schedule) -> Iterator[Violation]:
    if not schedule.is_lowered:
        return
    for rank, program in enumerate(schedule.programs):
        for position, action in enumerate(program):
            why = _why_unmatched(schedule, action)
            if why:
                yield _at(Fault.UNMATCHED, schedule, rank, position, why)


def _why_unmatched(schedule: Schedule, action: Action) -> str | None:
    rank = schedule.rank_of(action.stage, action.microbatch)
    if action.kind.is_transfer:
        other = counterpart(action)
        if other in schedule.actions and schedule.rank_of(other.stage, other.microbatch) == rank:
            return f"{action} stays on rank {rank}, whose stages hand over without a transfer"
        return None if other in schedule.actions else f"{action} has no {other} to match it"
    for need in needs(action, schedule):
        found = resolve(need, schedule.actions)
        crosses = found is not None and schedule.rank_of(found.stage, found.microbatch) != rank
        if crosses:
            return f"{action} needs {found} of another rank, and no {need[0]} brings it"
    return None


def _by_channel(schedule: Schedule, *, is_send: bool) -> dict[tuple[int, int], list[Action]]:
    """Per channel (sender, receiver), its sends or its receives in program order."""
    found = defaultdict(list)
    for action in schedule:
        if action.kind.is_send if is_send else action.kind.is_recv:
            other, microbatch = counterpart(action).stage, action.microbatch
            if 0 <= other < schedule.num_stages:
                here, there = schedule.rank_of(action.stage, microbatch), schedule.rank_of(other, microbatch)
                found[(here, there) if is_send else (there, here)].append(action)
    return found


def _deadlocks(schedule: Schedule) -> Iterator[Violation]:
    stuck = stuck_ranks(schedule)
    if not stuck:
        return
    count = buffers_needed(schedule)
    remedy = "no number of buffers helps" if count is None else f"{count} buffered messages per channel would do"
    for each in stuck:
        yield _at(Fault.DEADLOCK, schedule, each.rank, each.position, f"{_wait_text(each)}; {remedy}")


def _wait_text(stuck: Stuck) -> str:
    what = stuck.waits_for or "room in its channel, which buffers one message"
    return f"rank {stuck.rank} never gets past {stuck.action}: it waits for {what}"


def _over_limits(schedule: Schedule, limits: Limits) -> Iterator[Violation]:
    rows: list[tuple[int | None, Iterable[int], str]] = [
        (limits.held_to_input_grad, peak_held_to_input_grad(schedule), "micro-batches"),
    ]
    if limits.held is not None:
        rows.append((limits.activation_bytes, peak_activation_bytes(schedule, limits.held), "bytes"))
    for limit, peaks, unit in rows:
        for rank, count in enumerate(peaks):
            if limit is not None and count > limit:
                why = f"rank {rank} holds {count} {unit} at its peak; the limit is {limit}"
                yield _absent(Fault.OVER_LIMIT, schedule, rank, None, why)


def _at(fault: Fault, schedule: Schedule, rank: int, position: int, message: str) -> Violation:
    program = schedule.program(rank)
    return Violation(fault, rank, position, program[position], message, _picture(rank, program, position))


def _absent(fault: Fault, schedule: Schedule, rank: int, action: Action | None, message: str) -> Violation:
    return Violation(fault, rank, None, action, message, _picture(rank, schedule.program(rank), None))


def _picture(rank: int, program: Program, position: int | None) -> str:
    """The program around ``position`` with a mark under it; from its start where there is no position."""
    first = 0 if position is None else max(0, position - _NEIGHBOURS)
    last = first + 2 * _NEIGHBOURS + 1
    head = f"  rank {rank}: " + ("… " if first else "")
    cells = [str(action) for action in program[first:last]]
    line = head + " ".join(cells) + (" …" if last < len(program) else "")
    if position is None:
        return line
    before = len(head) + sum(len(cell) + 1 for cell in cells[: position - first])
    return f"{line}\n{' ' * before}{'^' * len(cells[position - first])} here"
