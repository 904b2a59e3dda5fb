"""Rules of a program beyond what waits for what: when a stage's parameters are there, and what may overlap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from pipeloom.ir.action import LAST_KINDS, Action, Kind, Overlap
from pipeloom.ir.relations import waits_for
from pipeloom.ir.schedule import Program, Schedule


def faults_of_stage_kinds(program: Program) -> Iterator[tuple[int, str]]:
    """Position and reason of each UNSHARD, RESHARD or REDUCE_GRAD, or computation, that stands in the wrong place.

    A stage that is ever unsharded has its parameters from an UNSHARD to a RESHARD, and computes nowhere else.
    REDUCE_GRAD stands once, after all that its stage adds up.
    """
    by_stage = defaultdict(list)
    for position, action in enumerate(program):
        by_stage[action.stage].append((position, action))
    for rows in by_stage.values():
        kinds = [action.kind for _, action in rows]
        if Kind.UNSHARD in kinds or Kind.RESHARD in kinds:
            yield from _sharding(rows)
        if Kind.REDUCE_GRAD in kinds:
            yield from _reduction(rows)


def _sharding(rows: list[tuple[int, Action]]) -> Iterator[tuple[int, str]]:
    has_parameters = False
    for position, action in rows:
        kind = action.kind
        if kind is Kind.UNSHARD:
            if has_parameters:
                yield position, f"{action} comes though the parameters are there already"
            has_parameters = True
        elif kind is Kind.RESHARD:
            if not has_parameters:
                yield position, f"{action} comes without an UNSHARD before it"
            has_parameters = False
        elif kind.is_compute and not has_parameters:
            yield position, f"{action} computes with parameters that are sharded; an UNSHARD is needed before it"


def _reduction(rows: list[tuple[int, Action]]) -> Iterator[tuple[int, str]]:
    at = [position for position, action in rows if action.kind is Kind.REDUCE_GRAD]
    adds = [position for position, action in rows if action.kind in LAST_KINDS]
    for position in at[1:]:
        yield position, "the gradients of the stage were reduced before"
    if not adds:
        yield at[0], "the stage adds no gradients up on this rank"
    elif adds[-1] > at[0]:
        yield at[0], "the stage adds gradients up after it"


def faults_of_overlaps(schedule: Schedule) -> Iterator[tuple[int, int, str]]:
    """Rank, position and reason of each overlap that no rank can run."""
    position_of = {
        action: (rank, position)
        for rank, program in enumerate(schedule.programs)
        for position, action in enumerate(program)
    }
    after = _computed_after(schedule)
    used = set()
    for overlap in sorted(schedule.overlaps, key=str):
        at = position_of.get(overlap.first) or position_of.get(overlap.second) or (0, 0)
        if overlap.first not in position_of or overlap.second not in position_of:
            yield *at, f"{overlap} is of an action that nobody does"
        elif why := _why_impossible(overlap, schedule):
            yield *at, why
        elif after.get(overlap.first) != overlap.second:
            yield *at, f"{overlap} is of two actions that do not stand next to each other, in this order"
        elif overlap.first in used or overlap.second in used:
            yield *at, f"{overlap} is of an action that overlaps with another one too"
        used |= {overlap.first, overlap.second}


def _computed_after(schedule: Schedule) -> dict[Action, Action]:
    """Per computation, the next one on its rank; what is sent and received between the two is no matter."""
    rows = ([action for action in program if not action.kind.is_transfer] for program in schedule.programs)
    return {action: following for row in rows for action, following in pairwise(row)}


def _why_impossible(overlap: Overlap, schedule: Schedule) -> str | None:
    if not (overlap.first.kind.is_compute and overlap.second.kind.is_compute):
        return f"{overlap} is of a transfer, or of what is done with parameters; computations overlap"
    if overlap.first in waits_for(overlap.second, schedule):
        return f"{overlap.second} needs {overlap.first}, so that they cannot overlap"
    return None
