"""`pipeloom simulate`: predict when each action of a schedule runs, in seconds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from pipeloom.cli.parser import Parser, number, per_stage
from pipeloom.cli.source import USAGE, add_schedule_options, schedule_of
from pipeloom.cli.terminal import columns_of, is_coloured
from pipeloom.cost import Costs, read_costs
from pipeloom.errors import CostError
from pipeloom.ir import Timeline
from pipeloom.report import describe, draw, figures_in_seconds, shortest_action_s
from pipeloom.sim import simulate

_PAGE_COLUMNS = 160
_NARROWEST_CELL = 3

# Option, name in `Costs`, type, default, help.
_COSTS = (
    ("--forward", "forward_s", per_stage, 1.0, "seconds of F"),
    ("--input-grad", "input_grad_s", per_stage, 1.0, "seconds of I"),
    ("--weight-grad", "weight_grad_s", per_stage, 1.0, "seconds of W; B takes I + W"),
    ("--transfer", "transfer_s", number, 0.0, "seconds of latency between ranks; occupies nobody"),
    ("--bytes-held-to-input-grad", "bytes_held_to_input_grad", per_stage, 0, "held from F until I"),
    ("--bytes-held-to-weight-grad", "bytes_held_to_weight_grad", per_stage, 0, "held from I until W"),
    ("--bytes-held-to-recompute", "bytes_held_to_recompute", per_stage, 0, "held from F until R"),
    ("--transfer-bytes-per-s", "transfer_bytes_per_s", number, None, "bandwidth from a rank to another"),
    ("--boundary-bytes", "boundary_bytes", per_stage, (), "message between two stages; needs a bandwidth"),
)


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse(argv)
    schedule = schedule_of(options)
    timeline = simulate(schedule, costs_of(options, schedule.num_stages))
    if options.json:
        import json

        print(json.dumps(figures_in_seconds(timeline)))
        return 0
    print(_drawing(timeline))
    for line in _description(timeline):
        print(line)
    return 0


def parser() -> Parser:
    """The command's options."""
    made = Parser("simulate", USAGE, "Predict when each action of a schedule runs, from what each costs.")
    add_schedule_options(made)
    group = made.add_argument_group(
        "costs", "A number for all stages or one for each, with commas between: 1.0 or 1.0,1.2,1.1,1.5"
    )
    for option, name, kind, default, text in _COSTS:
        shown = f"; default {default}" if isinstance(default, float) else ""
        metavar = "X" if kind is number else "X[,X…]"
        group.add_argument(option, dest=name, metavar=metavar, type=kind, help=text + shown)
    group.add_argument("--costs", metavar="FILE", help="read the costs from a JSON or TOML file, instead of options")
    made.add_argument("--json", action="store_true", help="print the figures as JSON, in seconds and bytes")
    return made


def costs_of(options: argparse.Namespace, num_stages: int) -> Costs:
    """The costs that the options give, or their file.

    Raises:
        CostError: both were given, or values do not fit.
    """
    given = {name: getattr(options, name) for _, name, *_ in _COSTS if getattr(options, name) is not None}
    if options.costs is None:
        defaults = {name: default for _, name, _, default, _ in _COSTS}
        return Costs.uniform(num_stages, **{**defaults, **given})
    if given:
        option = next(option for option, name, *_ in _COSTS if name in given)
        raise CostError(f"--costs was given with {option}; costs come from one place", "leave one of them out")
    return read_costs(options.costs, num_stages)


def _drawing(timeline: Timeline) -> str:
    """The ladder with the shortest action as one cell, where it fits; else a line that says so."""
    tick_s = shortest_action_s(timeline)
    room = columns_of(sys.stdout) or _PAGE_COLUMNS
    num_columns = round(_NARROWEST_CELL * timeline.makespan_s / tick_s)
    if num_columns <= room:
        drawn = draw(timeline, tick_s)
        num_columns = max(map(len, drawn.splitlines()))
        if num_columns <= room:
            return draw(timeline, tick_s, is_coloured=True) if is_coloured(sys.stdout) else drawn
    return f"(the drawing needs {num_columns} columns or more; there are {room})"


def _description(timeline: Timeline) -> Iterator[str]:
    yield from describe(timeline)
    yield f"Makespan: {timeline.makespan_s:.6g} s"
    yield f"Longest rank span: {timeline.longest_rank_span_s:.6g} s"
    yield f"Idle fraction without a barrier between steps: {timeline.bubble_fraction_unsynchronised:.0%}"
    if any(timeline.peak_activation_bytes or ()):
        yield f"Activations, at most: {' '.join(map(str, timeline.peak_activation_bytes or ()))} bytes, by GPU"
