"""Evaluation: the forwards of a schedule and nothing else."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir import Kind, Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """Keep the forwards, in their order; whatever belongs to the backward goes."""
    programs = tuple(tuple(a for a in program if a.kind is Kind.FORWARD) for program in schedule.programs)
    return replace(schedule, programs=programs, is_forward_only=True)
