"""Evaluation: forwards and nothing else."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir import Action, Kind, Placement, Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """Keep the forwards, in their order; whatever belongs to the backward goes."""
    programs = tuple(tuple(a for a in program if a.kind is Kind.FORWARD) for program in schedule.programs)
    return replace(schedule, programs=programs, is_forward_only=True)


def evaluation(placement: Placement, num_microbatches: int) -> Schedule:
    """Every stage runs all its micro-batches before its rank's next stage does: right for any placement."""
    programs = tuple(
        tuple(Action(Kind.FORWARD, stage, i) for stage in placement.stages_of(rank) for i in range(num_microbatches))
        for rank in range(placement.num_ranks)
    )
    return Schedule(placement, programs, num_microbatches, is_forward_only=True, name="evaluation")
