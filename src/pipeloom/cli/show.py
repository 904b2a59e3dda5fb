"""`pipeloom show`: draw and describe a schedule, in ticks."""

from __future__ import annotations

import sys

from pipeloom.cli.parser import Parser
from pipeloom.cli.source import USAGE, add_schedule_options, schedule_of
from pipeloom.cli.terminal import columns_of, is_coloured
from pipeloom.cost import Costs
from pipeloom.ir import Kind
from pipeloom.ir.notation import format_csv
from pipeloom.report import describe, draw, figures_in_ticks, whole
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

        print(json.dumps(figures_in_ticks(timeline)))
        return 0
    print(draw(timeline, 1.0, width=columns_of(sys.stdout), is_coloured=is_coloured(sys.stdout)))
    for line in describe(timeline):
        print(line)
    if not schedule.is_forward_only:
        of_one_tick = "F, R, I and W" if any(each.kind is Kind.RECOMPUTE for each in schedule) else "F, I and W"
        print(f"Makespan: {whole(timeline.makespan_s)} ticks ({of_one_tick} take 1, B takes 2)")
    return 0


def parser() -> Parser:
    """The command's options."""
    made = Parser("show", USAGE, "Draw and describe a schedule. F, I and W take one tick, B takes two.")
    add_schedule_options(made)
    group = made.add_mutually_exclusive_group()
    group.add_argument("--json", action="store_true", help="print the schedule and its figures as JSON, in ticks")
    group.add_argument("--csv", action="store_true", help="print the schedule as a CSV of torch")
    return made
