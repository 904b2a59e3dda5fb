"""Recomputation (GPipe, Huang et al., NeurIPS 2019, section 2.3) as an action of its own.

Between F and R a micro-batch holds nothing but its stage's input; R runs the forward again and B finds its
activations there. Because R stands in the program it can run while its rank waits for the gradient, and
`pipeloom.passes.early_recompute` finds it earlier waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pipeloom.ir import Action, Kind, Program, Schedule
from pipeloom.ir.relations import needs


def add_recompute(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Put an R before each B (or I) of the given stages, where there is none yet; before the whole of a pair.

    A forward-only schedule has no backward, so it stays as it is.
    """
    return schedule.with_programs(_with_recompute(schedule, program, stages) for program in schedule.programs)


def without_recompute(schedule: Schedule) -> Schedule:
    """Leave R out: activations are kept."""
    return schedule.with_programs(
        (action for action in program if action.kind is not Kind.RECOMPUTE) for program in schedule.programs
    )


def _with_recompute(schedule: Schedule, program: Program, stages: Collection[int]) -> Iterator[Action]:
    second_of = dict(schedule.overlaps)
    in_pairs = set(second_of.values())
    for action in program:
        for each in (action, second_of.get(action)):
            if each is not None and (each is not action or action not in in_pairs):
                yield from _again(schedule, each, stages)
        yield action


def _again(schedule: Schedule, action: Action, stages: Collection[int]) -> Iterator[Action]:
    again = Action(Kind.RECOMPUTE, action.stage, action.microbatch)
    uses_activations = any(again in need for need in needs(action, schedule))
    if uses_activations and action.stage in stages and again not in schedule.actions:
        yield again
