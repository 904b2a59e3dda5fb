"""Recomputation (GPipe, Huang et al., NeurIPS 2019, section 2.3) as an action of its own.

Between F and R a micro-batch holds nothing but its stage's input; R runs the forward again and B finds its
activations there. Because R stands in the program it can run while its rank waits for the gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pipeloom.ir import Action, Kind, Program, Schedule

_USES_ACTIVATIONS = (Kind.BACKWARD, Kind.INPUT_GRAD)


def add_recompute(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Put an R before each B (or I) of the given stages. A forward-only schedule is returned as it is."""
    return schedule.with_programs(_with_recompute(program, stages) for program in schedule.programs)


def _with_recompute(program: Program, stages: Collection[int]) -> Iterator[Action]:
    for action in program:
        if action.stage in stages and action.kind in _USES_ACTIVATIONS:
            yield Action(Kind.RECOMPUTE, action.stage, action.microbatch)
        yield action
