"""Which schedule a command is about: a name and its shape, or a file. Every command has these options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from pipeloom.cli.parser import Parser, count
from pipeloom.errors import NotationError, ScheduleError, UnsupportedShape
from pipeloom.ir import Schedule
from pipeloom.schedules import ENTRIES, entry, schedule
from pipeloom.schedules.stage_costs import StageCosts

USAGE = "NAME --stages N --micro-batches N [OPTIONS]"
MOST_ACTIONS = 4_000_000
_SHAPE = ("ranks", "stages", "stages_per_rank", "micro_batches", "group_size", "micro_batches_per_update")


def add_schedule_options(parser: Parser) -> None:
    """NAME, --from, the shape, options of single schedules and --forward-only."""
    names = " ".join(ENTRIES)
    parser.add_argument("name", metavar="NAME", nargs="?", help=f"the schedule, one of: {names}")
    group = parser.add_argument_group(
        "shape",
        "Any two of ranks, stages and stages per rank give the third; a schedule has its own stages per rank.",
    )
    group.add_argument("-p", "--ranks", metavar="N", type=count, help="ranks of the pipeline")
    group.add_argument("--stages", metavar="N", type=count, help="parts that the model is cut into")
    group.add_argument("-v", "--stages-per-rank", metavar="N", type=count, help="stages that a rank holds")
    group.add_argument("-m", "--micro-batches", metavar="N", type=count, help="micro-batches of one step")
    group.add_argument(
        "--group-size", metavar="N", type=count, help="micro-batches of a group, where stages interleave"
    )
    group.add_argument(
        "--micro-batches-per-update", metavar="N", type=count, help="of a batch, where weights are updated on the way"
    )
    group.add_argument("--forward-only", action="store_true", help="evaluation: no backward")
    group.add_argument(
        "--from", dest="path", metavar="FILE", help="read the schedule from a CSV of torch, instead of NAME"
    )


def schedule_of(options: argparse.Namespace, costs_of: Callable[[int], StageCosts] | None = None) -> Schedule:
    """The schedule that the options ask for.

    Args:
        options: parsed.
        costs_of: what so many stages cost, for schedules that are made from it; None: equal seconds.

    Raises:
        ScheduleError: it has no name, an unknown one, an impossible or inconsistent shape, or a faulty file.
    """
    if options.path is not None:
        return _from_file(options)
    if options.name is None:
        raise ScheduleError("no schedule was given", f"name one of {' '.join(ENTRIES)}, or a file with --from")
    own = entry(options.name).stages_per_rank
    num_ranks, stages_per_rank = shape(options.ranks, options.stages, options.stages_per_rank, own)
    if options.micro_batches is None:
        raise UnsupportedShape("the number of micro-batches is missing", "give --micro-batches N")
    given = {"group_size": options.group_size, "microbatches_per_update": options.micro_batches_per_update}
    num_actions = 2 * num_ranks * stages_per_rank * options.micro_batches
    if num_actions > MOST_ACTIONS:
        raise UnsupportedShape(
            f"a schedule of {num_actions:,} actions was asked for; at most {MOST_ACTIONS:,} fit in memory here",
            "a schedule repeats itself: a few times as many micro-batches as ranks show it all",
        )
    return schedule(
        options.name,
        num_ranks=num_ranks,
        num_microbatches=options.micro_batches,
        stages_per_rank=stages_per_rank,
        costs=None if costs_of is None else costs_of(num_ranks * stages_per_rank),
        forward_only=options.forward_only,
        **{name: each for name, each in given.items() if each is not None},
    )


def shape(num_ranks: int | None, num_stages: int | None, stages_per_rank: int | None, own: int = 1) -> tuple[int, int]:
    """Ranks and stages per rank from any two of the three counts, or from one with ``own`` stages per rank.

    Raises:
        UnsupportedShape: too few were given, or they do not fit.
    """
    if num_stages is None:
        if num_ranks is None:
            raise UnsupportedShape("the number of stages is missing", "give --stages N or --ranks N")
        return num_ranks, stages_per_rank or own
    if num_ranks is None:
        return _divided(num_stages, stages_per_rank or own, "stages per rank"), stages_per_rank or own
    if stages_per_rank not in (None, num_stages / num_ranks):
        raise UnsupportedShape(
            f"{num_ranks} ranks, {num_stages} stages and {stages_per_rank} stages per rank were given; "
            "stages must be ranks × stages per rank",
            "leave one of the three out",
        )
    return num_ranks, _divided(num_stages, num_ranks, "ranks")


def _divided(num_stages: int, divisor: int, what: str) -> int:
    if num_stages % divisor:
        raise UnsupportedShape(
            f"{num_stages} stages and {divisor} {what} were given; every rank must hold as many stages as any other"
        )
    return num_stages // divisor


def _from_file(options: argparse.Namespace) -> Schedule:
    # Here rather than above: `pipeloom show NAME` needs neither, and should start at once.
    from pipeloom.ir.notation import parse_csv
    from pipeloom.ir.verify import require_valid

    given = [f"--{name.replace('_', '-')}" for name in _SHAPE if getattr(options, name) is not None]
    given += ["--forward-only"] if options.forward_only else []
    given += [options.name] if options.name is not None else []
    if given:
        raise ScheduleError(f"--from was given with {given[0]}; the file says all there is to say")
    made = parse_csv(_read(Path(options.path)), name=Path(options.path).stem)
    if made.num_microbatches > len(made):
        raise NotationError(
            f"{options.path} holds micro-batch {made.num_microbatches - 1}, but {len(made)} actions in all; "
            "each micro-batch needs a forward at least"
        )
    return require_valid(made)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotationError(f"schedule file {str(path)!r} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NotationError(f"schedule file {str(path)!r} cannot be read: {error}") from None
