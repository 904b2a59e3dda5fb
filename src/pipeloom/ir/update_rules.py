"""Rules of schedules that update weights inside their programs (PipeDream and its kin).

Updates cut the micro-batches into batches: those up to the first update, those after it up to the second, and so on.
Each stage adds up the gradients of one batch, updates, and goes on with the next; which weights a forward of a batch
uses is free, as long as they are there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from pipeloom.ir.action import BACKWARD_KINDS, Action, Kind
from pipeloom.ir.schedule import Schedule


def missing_updates(schedule: Schedule) -> Iterator[tuple[Action, str]]:
    """Updates that other stages do; and those after the last micro-batch, whose gradient nobody would use."""
    if not schedule.updates:
        return
    last = schedule.num_microbatches - 1
    for stage in range(schedule.num_stages):
        for microbatch in sorted({*schedule.updates, last}):
            action = Action(Kind.UPDATE, stage, microbatch)
            if action not in schedule.actions:
                why = "other stages update after that micro-batch" if microbatch in schedule.updates else (
                    "the gradients of the last micro-batches would be left over"
                )  # fmt: skip
                yield action, f"{action} is missing on rank {schedule.rank_of(stage)}: {why}"


def faults_of_updates(schedule: Schedule) -> Iterator[tuple[int, int, str]]:
    """Rank, position and reason of each action that stands on the wrong side of an update, or uses no version."""
    if not schedule.updates and not schedule.pins:
        return
    pinned: dict[Action, list[int]] = {}
    for pin in schedule.pins:
        pinned.setdefault(pin.forward, []).append(pin.version)
    for rank, program in enumerate(schedule.programs):
        done: Counter[int] = Counter()
        for position, action in enumerate(program):
            why = _why_wrong(action, done[action.stage], schedule.updates)
            why = why or _why_unpinnable(action, done[action.stage], sorted(pinned.pop(action, [])))
            if why:
                yield rank, position, why
            done[action.stage] += action.kind is Kind.UPDATE
    for forward in sorted(pinned, key=str):
        yield 0, 0, f"{forward} is pinned to a version of the weights, but nobody does it"


def _why_wrong(action: Action, num_done: int, updates: tuple[int, ...]) -> str | None:
    if not updates or not (action.kind in BACKWARD_KINDS or action.kind is Kind.UPDATE):
        return None
    due = bisect_left(updates, action.microbatch)
    if num_done == due:
        return None
    if action.kind is Kind.UPDATE:
        return f"{action} is update {due} of its stage and stands where update {num_done} is due"
    update = Action(Kind.UPDATE, action.stage, updates[min(num_done, due)])
    if num_done < due:
        return f"{action} stands before {update}, which would take its gradient for one of an earlier batch"
    return f"{action} stands after {update}, which needs its gradient"


def _why_unpinnable(action: Action, num_done: int, versions: list[int]) -> str | None:
    if len(versions) > 1:
        return f"{action} is pinned to several versions of the weights: {' '.join(map(str, versions))}"
    if versions and action.kind is not Kind.FORWARD:
        return f"{action} is pinned to a version of the weights; forwards are, and the rest follows them"
    if versions and versions[0] > num_done:
        return f"{action} is pinned to version {versions[0]} of the weights; after {num_done} updates there is none yet"
    return None
