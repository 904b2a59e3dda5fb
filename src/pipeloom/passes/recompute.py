"""Recomputation (GPipe, Huang et al., NeurIPS 2019, section 2.3) as an action of its own.

Between F and R a micro-batch holds nothing but its stage's input; R runs the forward again and B finds its
activations there. Because R stands in the program it can run while its rank waits for the gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pipeloom.ir import Action, Kind, Program, Schedule
from pipeloom.ir.relations import needs


def add_recompute(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Put an R before each B (or I) of the given stages, where there is none yet.

    A forward-only schedule has no backward, so it stays as it is.
    """
    return schedule.with_programs(_with_recompute(schedule, program, stages) for program in schedule.programs)


def _with_recompute(schedule: Schedule, program: Program, stages: Collection[int]) -> Iterator[Action]:
    for action in program:
        again = Action(Kind.RECOMPUTE, action.stage, action.microbatch)
        uses_activations = any(again in need for need in needs(action, schedule.num_stages))
        if uses_activations and action.stage in stages and again not in schedule.actions:
            yield again
        yield action
