"""torch's own schedules beside the same ones of Pipeloom, each rank a process, over gloo, in turns in one run.

    python -m benchmarks.torch_schedules [--schedules zb-v,dualpipe-v] [--sizes 4x8] [--forward-ms 10,50] [--json]

Stages wait instead of computing: so long for F, for I and for W, and twice as long for B. What a step takes beyond its
simulated makespan is the excess; ours is to be at most half of torch's. Beside it stand a loop written by hand for each
rank (detach, backward, bytes on a socket, nothing else), with its excess ÷ torch's; and what F, I and W of one stage
take when torch splits its backward.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.devices.sizes import sizes
from benchmarks.peers.figures import Spread
from benchmarks.peers.launch import TrialFailed, result_of_processes
from benchmarks.torch_schedules.contestants import CONTESTANTS
from benchmarks.torch_schedules.trial import CLASSES, Trial

NEEDED = 0.5
Row = dict[str, Any]


def trials(options: argparse.Namespace) -> Iterator[Trial]:
    for forward_ms in options.forward_ms:
        for num_ranks, num_microbatches in options.sizes:
            for name in options.schedules:
                shape = (name, num_ranks, num_microbatches)
                yield Trial(*shape, forward_ms / 1e3, options.rounds, options.steps)


def row(trial: Trial) -> Row:
    """The figures of a trial.

    Raises:
        TrialFailed: its processes failed.
    """
    found = result_of_processes("benchmarks.torch_schedules.worker", trial.num_ranks, asdict(trial))
    simulated_s = trial.simulated_s
    excess = {name: Spread.of([step_s / simulated_s - 1 for step_s in each]) for name, each in found["steps_s"].items()}
    return asdict(trial) | {
        "simulated_s": simulated_s,
        "excess": {name: asdict(spread) for name, spread in excess.items()},
        "ratio": excess["pipeloom"].median / excess["torch"].median,
        "by_hand_ratio": excess["by_hand"].median / excess["torch"].median,
        "one_stage_s": found["one_stage_s"],
    }


def line(row: Row) -> str:
    cells = "  ".join(f"{_cell(row['excess'][name]):18}" for name in CONTESTANTS)
    ratio = f"{row['ratio']:.2f} {'met' if row['ratio'] <= NEEDED else 'MISSED'}"
    one_stage = " ".join(f"{seconds * 1e3:5.2f}" for seconds in row["one_stage_s"].values())
    shape = f"{row['num_ranks']} × {row['num_microbatches']}"
    return (
        f"{row['schedule']:14}  {shape:6}  {row['simulated_s']:11.3f}  {cells}  {ratio:11}  {row['by_hand_ratio']:7.2f}"
        f"  {one_stage}"
    )


def _cell(spread: dict[str, float]) -> str:
    median, first, third = (spread[each] * 100 for each in ("median", "first_quartile", "third_quartile"))
    return f"{median:.1f} % [{first:.1f}, {third:.1f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    rows, failures = [], []
    if not options.json:
        print(
            f"excess of a step over its simulated makespan, median [quartiles]; load average {os.getloadavg()[0]:.1f}"
        )
        heads = f"{'Pipeloom':18}  {'torch':18}  {'by hand':18}  ratio        by hand"
        print(f"{'schedule':14}  {'size':6}  simulated s  {heads}  F, I, W in torch, ms")
    for trial in trials(options):
        try:
            rows.append(row(trial))
        except TrialFailed as error:
            failures.append(f"{trial.schedule}: {error}")
            continue
        if not options.json:
            print(line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torch_schedules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedules", type=_names, default=list(CLASSES), help="names with commas (default all)")
    parser.add_argument("--sizes", type=sizes, default=[(4, 8)], help="ranks x micro-batches (default 4x8)")
    parser.add_argument("--forward-ms", type=_numbers, default=[10.0, 50.0], help="of F, I and W each (default 10,50)")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each (default 4)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in a turn (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON; seconds")
    return parser.parse_args(arguments)


def _names(given: str) -> list[str]:
    names = [name.strip() for name in given.split(",")]
    if unknown := set(names) - set(CLASSES):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)} were given; torch has {', '.join(CLASSES)}")
    return names


def _numbers(given: str) -> list[float]:
    return [float(each) for each in given.split(",")]


if __name__ == "__main__":
    sys.exit(main())
