"""`pipeloom compare`: every schedule for the same ranks, micro-batches and costs, the shortest first."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pipeloom.cli.parser import Parser, count
from pipeloom.cli.simulate import add_cost_options, costs_of
from pipeloom.cost import Costs
from pipeloom.errors import UnsupportedShape
from pipeloom.ir import Placement, Schedule, Timeline
from pipeloom.schedules.entry import Entry
from pipeloom.schedules.formulas import Times
from pipeloom.schedules.registry import ENTRIES, schedule
from pipeloom.schedules.shape import Shape
from pipeloom.sim import simulate

_HEADS = (
    "schedule",
    "stages",
    "makespan",
    "idle",
    "by formula",
    "no barrier",
    "held to I",
    "to W",
    "bytes",
    "messages",
    "idle in the long run",
)


@dataclass(frozen=True)
class Row:
    """One schedule.

    Args:
        name: of the schedule.
        stages_per_rank: how many it has.
        makespan_s: of a step.
        bubble_fraction: idle time ÷ (ranks × makespan).
        bubble_fraction_by_formula: what its paper promises, for equal stages; None where it promises nothing.
        bubble_fraction_unsynchronised: over the longest rank span.
        peak_held_to_input_grad: the most micro-batches that a rank holds until I, in shares of a rank.
        peak_held_to_weight_grad: likewise until W.
        peak_activation_bytes: the most bytes of a rank.
        num_messages: between ranks in a step.
        bubble_fraction_in_the_long_run: of a schedule that updates weights and never drains, idle time per batch once
            the pipeline is full; None for others, which fill and drain it in every step.
        num_weight_copies: the most copies or versions of its weights that a rank holds.
    """

    name: str
    stages_per_rank: int
    makespan_s: float
    bubble_fraction: float
    bubble_fraction_by_formula: float | None
    bubble_fraction_unsynchronised: float
    peak_held_to_input_grad: float
    peak_held_to_weight_grad: float
    peak_activation_bytes: int
    num_messages: int
    num_weight_copies: float
    bubble_fraction_in_the_long_run: float | None


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse(argv)
    share = costs_of(options, options.ranks)
    rows, left_out = compared(options, share)
    if options.json:
        import json

        print(json.dumps({"schedules": [asdict(row) for row in rows], "left_out": left_out}))
        return 0
    for line in _table(rows):
        print(line)
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")
    return 0


def parser() -> Parser:
    """The command's options."""
    made = Parser(
        "compare",
        "-p N -m N [OPTIONS]",
        "Simulate every schedule on the same ranks. Costs are those of all that a rank holds: a schedule with two "
        "stages on each rank has half of them in each.",
    )
    made.add_argument("-p", "--ranks", metavar="N", type=count, required=True, help="ranks of the pipeline")
    made.add_argument("-m", "--micro-batches", metavar="N", type=count, required=True, help="micro-batches of one step")
    add_cost_options(made)
    made.add_argument("--json", action="store_true", help="print the figures as JSON, in seconds and bytes")
    return made


def compared(options: argparse.Namespace, share: Costs) -> tuple[list[Row], dict[str, str]]:
    """The rows, shortest first, and why other schedules do not exist for this shape."""
    rows, left_out = [], {}
    for entry in ENTRIES.values():
        shape = Shape(options.ranks, options.micro_batches, entry.stages_per_rank)
        try:
            rows.append(_row(entry, shape, share))
        except UnsupportedShape as error:
            left_out[entry.name] = error.message
    return sorted(rows, key=lambda row: row.makespan_s), left_out


def _row(entry: Entry, shape: Shape, share: Costs) -> Row:
    made = schedule(entry.name, num_ranks=shape.num_ranks, num_microbatches=shape.num_microbatches)
    costs = spread(share, made.placement)
    if "costs" in entry.takes:
        made = schedule(entry.name, num_ranks=shape.num_ranks, num_microbatches=shape.num_microbatches, costs=costs)
    timeline = simulate(made, costs)
    return Row(
        name=entry.name,
        stages_per_rank=shape.stages_per_rank,
        makespan_s=timeline.makespan_s,
        bubble_fraction=timeline.bubble_fraction,
        bubble_fraction_by_formula=_promised(entry, shape, costs),
        bubble_fraction_unsynchronised=timeline.bubble_fraction_unsynchronised,
        peak_held_to_input_grad=max(timeline.peak_held_to_input_grad) / shape.stages_per_rank,
        peak_held_to_weight_grad=max(timeline.peak_held_to_weight_grad) / shape.stages_per_rank,
        peak_activation_bytes=max(timeline.peak_activation_bytes or (0,)),
        num_messages=num_messages(made),
        num_weight_copies=max(timeline.peak_versions_held) / shape.stages_per_rank,
        bubble_fraction_in_the_long_run=_in_the_long_run(entry, shape, costs, timeline) if made.updates else None,
    )


def _in_the_long_run(entry: Entry, shape: Shape, costs: Costs, timeline: Timeline) -> float:
    """The idle fraction of what a run twice as long takes more."""
    p, m, _ = shape
    longer = simulate(schedule(entry.name, num_ranks=p, num_microbatches=2 * m), costs)
    more_s, busy_s = longer.makespan_s - timeline.makespan_s, sum(longer.busy_s) - sum(timeline.busy_s)
    return max(0.0, 1 - busy_s / (p * more_s)) if more_s else 0.0


def spread(share: Costs, placement: Placement) -> Costs:
    """What each stage costs where what a rank holds costs ``share``, in equal parts; a message is as large as ever."""
    ranks = [placement.rank_of(stage) for stage in range(placement.num_stages)]
    parts = placement.num_stages // placement.num_ranks

    def seconds(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(values[rank] / parts for rank in ranks) if values else ()

    def whole(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[rank] // parts for rank in ranks)

    return Costs(
        forward_s=seconds(share.forward_s),
        input_grad_s=seconds(share.input_grad_s),
        weight_grad_s=seconds(share.weight_grad_s),
        transfer_s=share.transfer_s,
        bytes_held_to_input_grad=whole(share.bytes_held_to_input_grad),
        bytes_held_to_weight_grad=whole(share.bytes_held_to_weight_grad),
        bytes_held_to_recompute=whole(share.bytes_held_to_recompute),
        transfer_bytes_per_s=share.transfer_bytes_per_s,
        boundary_bytes=(max(share.boundary_bytes, default=0),) * (placement.num_stages - 1)
        if share.transfer_bytes_per_s
        else (),
        overlap_s=seconds(share.overlap_s),
    )


def num_messages(made: Schedule) -> int:
    """How many messages travel between ranks: a value and its gradient at each change of rank."""
    stages, first = range(made.num_stages - 1), (0, made.num_microbatches - 1)
    replicas = first if made.placement.opposed else first[:1]
    changes = sum(made.rank_of(s, each) != made.rank_of(s + 1, each) for each in replicas for s in stages)
    return 2 * changes * made.num_microbatches // len(replicas)


def _promised(entry: Entry, shape: Shape, costs: Costs) -> float | None:
    kinds = (costs.forward_s, costs.input_grad_s, costs.weight_grad_s)
    if (
        entry.formulas.bubble_s is None
        or costs.transfer_s
        or costs.overlap_s
        or any(len(set(each)) > 1 for each in kinds)
    ):
        return None
    times = Times(*[each[0] for each in kinds])
    bubble_s = entry.formulas.bubble_s(shape, times)
    work_s = entry.busy_s(shape, times)
    return None if bubble_s is None or not work_s else bubble_s / (work_s + bubble_s)


def _table(rows: list[Row]) -> Iterator[str]:
    cells = [_HEADS, *map(_cells, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADS))]
    for row in cells:
        yield "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    promised = row.bubble_fraction_by_formula
    name = row.name if row.num_weight_copies == 1 else f"{row.name} ({row.num_weight_copies:.4g} × weights)"
    return (
        name,
        str(row.stages_per_rank),
        f"{row.makespan_s:.6g} s",
        f"{row.bubble_fraction:.2%}",
        "" if promised is None else f"{promised:.2%}",
        f"{row.bubble_fraction_unsynchronised:.2%}",
        f"{row.peak_held_to_input_grad:.4g}",
        f"{row.peak_held_to_weight_grad:.4g}",
        f"{row.peak_activation_bytes:,}" if row.peak_activation_bytes else "",
        f"{row.num_messages:,}",
        "" if row.bubble_fraction_in_the_long_run is None else f"{row.bubble_fraction_in_the_long_run:.2%}",
    )
