"""Evaluation: forwards and nothing else."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir import Action, Kind, Placement, Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """Keep the forwards, in their order; whatever belongs to the backward goes."""
    programs = tuple(tuple(a for a in program if a.kind is Kind.FORWARD) for program in schedule.programs)
    return replace(schedule, programs=programs, is_forward_only=True, overlaps=frozenset(), pins=frozenset())


def evaluation(placement: Placement, num_microbatches: int) -> Schedule:
    """Every stage runs all its micro-batches before its rank's next stage does: right for any placement."""
    empty = Schedule(placement, ((),) * placement.num_ranks, num_microbatches, is_forward_only=True, name="evaluation")
    return empty.with_programs(
        (
            Action(Kind.FORWARD, stage, i)
            for stage in placement.stages_of(rank)
            for i in range(num_microbatches)
            if empty.rank_of(stage, i) == rank
        )
        for rank in range(placement.num_ranks)
    )
