"""`pipeloom show`: draw and describe a schedule, in ticks."""

from __future__ import annotations

import sys

from pipeloom.cli.parser import Parser
from pipeloom.cli.source import USAGE, add_schedule_options, schedule_of
from pipeloom.cli.terminal import columns_of, is_coloured
from pipeloom.cost import Costs
from pipeloom.ir import Schedule, Timeline
from pipeloom.ir.notation import format_csv, format_program
from pipeloom.report import describe, draw
from pipeloom.sim import simulate


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse(argv)
    schedule = schedule_of(options)
    if options.csv:
        sys.stdout.write(format_csv(schedule))
        return 0
    timeline = simulate(schedule, Costs.unit(schedule.num_stages))
    if options.json:
        import json

        print(json.dumps(figures(timeline)))
        return 0
    print(draw(timeline, 1.0, width=columns_of(sys.stdout), is_coloured=is_coloured(sys.stdout)))
    for line in describe(timeline, f"{_whole(timeline.makespan_s)} ticks (F, I, W: 1; B: 2)"):
        print(line)
    return 0


def parser() -> Parser:
    """The command's options."""
    made = Parser("show", USAGE, "Draw and describe a schedule. F, I and W take one tick, B takes two.")
    add_schedule_options(made)
    group = made.add_mutually_exclusive_group()
    group.add_argument("--json", action="store_true", help="print the schedule and its figures as JSON, in ticks")
    group.add_argument("--csv", action="store_true", help="print the schedule as a CSV of torch")
    return made


def figures(timeline: Timeline) -> dict[str, object]:
    """What ``--json`` prints; times in ticks."""
    schedule = timeline.schedule
    return {
        **counts(schedule),
        "programs": [format_program(program) for program in schedule.programs],
        "makespan": _whole(timeline.makespan_s),
        "bubble_fraction": timeline.bubble_fraction,
        "longest_rank_span": _whole(timeline.longest_rank_span_s),
        "peak_held_to_input_grad": timeline.peak_held_to_input_grad,
        "peak_held_to_weight_grad": timeline.peak_held_to_weight_grad,
    }


def counts(schedule: Schedule) -> dict[str, object]:
    """Name and shape of a schedule, as every command prints them in JSON."""
    return {
        "schedule": schedule.name,
        "forward_only": schedule.is_forward_only,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "placement": schedule.placement.ranks,
    }


def _whole(ticks: float) -> int | float:
    return int(ticks) if ticks.is_integer() else ticks
