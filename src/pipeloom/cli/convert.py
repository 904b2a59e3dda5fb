"""`pipeloom convert`: write a schedule as the CSV of torch.distributed.pipelining, which torchtitan reads too."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeloom.cli.parser import Parser, count
from pipeloom.cli.source import USAGE, add_schedule_options, schedule_of
from pipeloom.errors import NotationError
from pipeloom.ir import Schedule
from pipeloom.ir.notation import format_csv
from pipeloom.ir.verify import require_valid
from pipeloom.passes import (
    add_reductions,
    add_sharding,
    add_transfers,
    post_receives_early,
    without_sharding,
    without_transfers,
)


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse(argv)
    schedule = schedule_of(options)
    if schedule.updates or schedule.pins:
        raise NotationError(
            f"schedule {schedule.name!r} updates weights inside its programs; torch's CSV has no word for that, nor "
            "for the version of the weights that a forward uses",
            "pipeloom show NAME --csv writes it in our own notation, which --from reads",
        )
    text = format_csv(require_valid(converted(schedule, options)))
    if options.to is None:
        sys.stdout.write(text)
        return 0
    try:
        Path(options.to).write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise NotationError(f"{options.to} cannot be written: {error.strerror}") from None
    print(f"wrote {options.to}")
    return 0


def parser() -> Parser:
    """The command's options."""
    made = Parser(
        "convert",
        USAGE,
        "Write a schedule as the CSV of torch.distributed.pipelining: computations alone (compute_only), or with "
        "transfers (compute_comms).",
    )
    add_schedule_options(made)
    made.add_argument("--transfers", action="store_true", help="with sends and receives; without, they are left out")
    made.add_argument(
        "--receive-slots", metavar="N", type=count, help="and receives posted as early as N buffers of a rank allow"
    )
    made.add_argument(
        "--unshard", metavar="N", type=count, help="with UNSHARD and RESHARD, at most N stages of a rank at once"
    )
    made.add_argument("--reduce", action="store_true", help="with a REDUCE_GRAD after the last backward of each stage")
    made.add_argument("--to", metavar="FILE", help="where to write it; default: stdout")
    return made


def converted(schedule: Schedule, options: argparse.Namespace) -> Schedule:
    """With what the options ask for, and without what they do not."""
    made = without_sharding(without_transfers(schedule))
    made = add_sharding(made, options.unshard) if options.unshard else made
    made = add_reductions(made) if options.reduce else made
    made = add_transfers(made) if options.transfers else made
    return post_receives_early(made, options.receive_slots) if options.receive_slots else made
