"""`pipeloom simulate`: predict when each action of a schedule runs, in seconds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial

from pipeloom.cli.parser import Parser, count, number, per_stage
from pipeloom.cli.source import USAGE, add_schedule_options, schedule_of
from pipeloom.cli.terminal import columns_of, is_coloured
from pipeloom.cost import Costs, read_costs
from pipeloom.errors import CostError, UnsupportedShape
from pipeloom.ir import Schedule, Timeline
from pipeloom.passes import add_recompute, add_transfers, early_recompute, post_receives_early, without_recompute
from pipeloom.report import describe, draw, figures_in_seconds, shortest_action_s
from pipeloom.report.memory import describe_others, describe_receives, figures_of_others
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
    schedule = schedule_of(options, lambda num_stages: costs_of(options, num_stages))
    costs = costs_of(options, schedule.num_stages)
    timeline, others = _simulated(schedule, costs, options)
    if options.json:
        import json

        more = {"others": figures_of_others(others)} if others else {}
        print(json.dumps({**figures_in_seconds(timeline), **more}))
        return 0
    print(_drawing(timeline))
    for line in _description(timeline):
        print(line)
    for line in describe_others(others):
        print(line)
    if options.receive_slots is not None:
        lowered = post_receives_early(add_transfers(timeline.schedule), options.receive_slots)
        for line in describe_receives(lowered, costs.boundary_bytes):
            print(line)
    return 0


def _simulated(schedule: Schedule, costs: Costs, options: argparse.Namespace) -> tuple[Timeline, dict[str, Timeline]]:
    """What was asked for, and beside it the same work with less recomputation, or none."""
    run = partial(simulate, costs=costs)
    made = schedule if options.recompute is None else add_recompute(schedule, _stages(options.recompute, schedule))
    late, others = run(made), {}
    if without_recompute(made) != made:
        others["Without recomputation"] = run(without_recompute(made))
    if not options.early:
        return late, others
    others["With each R right before its backward"] = late
    return run(early_recompute(made, run, held=costs, max_bytes=options.max_activation_bytes)), others


def _stages(given: list[int], schedule: Schedule) -> list[int]:
    wrong = [stage for stage in given if stage >= schedule.num_stages]
    if wrong:
        raise UnsupportedShape(f"stage {wrong[0]} was given to --recompute; there are {schedule.num_stages}, from 0 on")
    return given or list(range(schedule.num_stages))


def parser() -> Parser:
    """The command's options."""
    made = Parser("simulate", USAGE, "Predict when each action of a schedule runs, from what each costs.")
    add_schedule_options(made)
    add_cost_options(made)
    group = made.add_argument_group("memory")
    group.add_argument(
        "--recompute", metavar="STAGES", type=_chosen, help="run the forward again before backwards: all, or 0,2,3"
    )
    group.add_argument("--early", action="store_true", help="and in a wait of the rank before that, where R fits")
    group.add_argument(
        "--max-activation-bytes", metavar="N", type=count, help="of a rank, that --early may lead to; default: any"
    )
    group.add_argument("--receive-slots", metavar="N", type=count, help="count buffers of receives posted N ahead")
    made.add_argument("--json", action="store_true", help="print the figures as JSON, in seconds and bytes")
    return made


def _chosen(text: str) -> list[int]:
    """Stages by number; none of them means all."""
    parts = [] if text == "all" else text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} was given; all, or numbers of stages are needed, as 0,2,3")
    return [int(part) for part in parts]


def add_cost_options(parser: Parser) -> None:
    """What actions cost, option by option or in a file."""
    group = parser.add_argument_group(
        "costs", "A number for all stages or one for each, with commas between: 1.0 or 1.0,1.2,1.1,1.5"
    )
    for option, name, kind, default, text in _COSTS:
        shown = f"; default {default}" if isinstance(default, float) else ""
        metavar = "X" if kind is number else "X[,X…]"
        group.add_argument(option, dest=name, metavar=metavar, type=kind, help=text + shown)
    group.add_argument("--costs", metavar="FILE", help="read the costs from a JSON or TOML file, instead of options")


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
