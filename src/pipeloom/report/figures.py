"""A timeline in figures, under the names that `--json` prints."""

from __future__ import annotations

from pipeloom.ir import Schedule, Timeline
from pipeloom.ir.notation import format_program


def figures_in_ticks(timeline: Timeline) -> dict[str, object]:
    """The schedule and its figures for a timeline in which a second is a tick."""
    schedule = timeline.schedule
    return {
        **_counts(schedule),
        "programs": [format_program(program, pins=schedule.pins) for program in schedule.programs],
        "makespan": whole(timeline.makespan_s),
        "bubble_fraction": timeline.bubble_fraction,
        "longest_rank_span": whole(timeline.longest_rank_span_s),
        "peak_held_to_input_grad": timeline.peak_held_to_input_grad,
        "peak_held_to_weight_grad": timeline.peak_held_to_weight_grad,
        "peak_versions_held": timeline.peak_versions_held,
    }


def figures_in_seconds(timeline: Timeline) -> dict[str, object]:
    """The figures of a timeline, in seconds, bytes and micro-batches."""
    return {
        **_counts(timeline.schedule),
        "makespan_s": timeline.makespan_s,
        "longest_rank_span_s": timeline.longest_rank_span_s,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_fraction_unsynchronised": timeline.bubble_fraction_unsynchronised,
        "peak_activation_bytes": timeline.peak_activation_bytes,
        "peak_held_to_input_grad": timeline.peak_held_to_input_grad,
        "peak_held_to_weight_grad": timeline.peak_held_to_weight_grad,
        "peak_versions_held": timeline.peak_versions_held,
    }


def whole(ticks: float) -> int | float:
    """An int where the number is whole."""
    return int(ticks) if ticks.is_integer() else ticks


def _counts(schedule: Schedule) -> dict[str, object]:
    return {
        "schedule": schedule.name,
        "forward_only": schedule.is_forward_only,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "placement": schedule.placement.ranks,
    }
