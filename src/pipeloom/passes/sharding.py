"""When a stage's parameters are gathered, let go, and when its gradients are reduced, for data parallelism.

Where parameters are sharded over data-parallel replicas (FSDP, ZeRO), a stage computes only between an UNSHARD and a
RESHARD. Here both stand in the program: the next stages' parameters come while an earlier one computes. The rule is
that of torch's ``_add_unshard_reshard``: at any time at most ``max_unsharded`` stages, those that are needed next.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir import Action, Kind, Program, Schedule
from pipeloom.ir.action import ALL, LAST_KINDS


def add_sharding(schedule: Schedule, max_unsharded: int = 3) -> Schedule:
    """Put an UNSHARD before a stage is needed, and a RESHARD after, so that few stages are whole at once.

    Args:
        schedule: without any.
        max_unsharded: stages of a rank whose parameters are there at once, at most; at least 1.
    """
    return schedule.with_programs(_sharded(program, max_unsharded) for program in schedule.programs)


def add_reductions(schedule: Schedule) -> Schedule:
    """Put a REDUCE_GRAD after the last backward of each stage of a rank, where there is none yet.

    It also adds up what two replicas of a stage made, where the placement has two.
    """
    return schedule.with_programs(_reduced(program) for program in schedule.programs)


def without_sharding(schedule: Schedule) -> Schedule:
    """Leave out what is done with parameters: transfers and computations stay."""
    return schedule.with_programs(
        (action for action in program if not action.kind.is_of_stage) for program in schedule.programs
    )


def _sharded(program: Program, max_unsharded: int) -> Iterator[Action]:
    active: set[int] = set()
    upcoming = _next_stages(program, max_unsharded)
    for action, wanted in zip(program, upcoming, strict=True):
        for stage in sorted(active.difference(wanted)):
            active.remove(stage)
            yield Action(Kind.RESHARD, stage, ALL)
        for stage in wanted:
            if stage not in active:
                active.add(stage)
                yield Action(Kind.UNSHARD, stage, ALL)
        yield action
    yield from (Action(Kind.RESHARD, stage, ALL) for stage in sorted(active))


def _next_stages(program: Program, count: int) -> list[tuple[int, ...]]:
    """Per action, the ``count`` stages that are computed next from there on, itself first; one walk from the end."""
    found: list[tuple[int, ...]] = []
    following: tuple[int, ...] = ()
    for action in reversed(program):
        if action.kind.is_compute:
            following = (action.stage, *[stage for stage in following if stage != action.stage])
        found.append(following[:count])
    return found[::-1]


def _reduced(program: Program) -> Iterator[Action]:
    last = {action.stage: i for i, action in enumerate(program) if action.kind in LAST_KINDS}
    done = {action.stage for action in program if action.kind is Kind.REDUCE_GRAD}
    for i, action in enumerate(program):
        yield action
        if last.get(action.stage) == i and action.stage not in done:
            yield Action(Kind.REDUCE_GRAD, action.stage, ALL)
