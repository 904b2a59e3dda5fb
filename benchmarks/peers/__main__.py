"""Pipeloom's processes beside others that run the same stages, in turns in one run.

    python -m benchmarks.peers [--rows abcd] [--quick] [--json]

(a) virtual devices that wait 10 ms forward and 20 ms backward, 4 ranks × 8 micro-batches and 8 × 32, gpipe and 1f1b:
    a step's excess over its simulated makespan; Pipeloom's is to be at most half of torch's.
(b) the same with stages that do nothing: a step ÷ the compute actions of one rank; likewise.
(c) the default GPT of `pipeloom train` on 2 processes, with AdamW and clipping over all stages: tokens a second; at
    least torch's 1F1B.
(d) the peak resident memory of each rank in (c), every peer in processes of its own.

Peers: torch.distributed.pipelining; a loop written by hand with isend and recv; in (c) and (d) also one process with
two threads that accumulates gradients, and DeepSpeed's pipeline where it can be imported. All communicate by gloo on
this machine. Figures are medians of all timed steps, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.peers.contestants import has_deepspeed
from benchmarks.peers.figures import MemoryRow, Row, beside_torch, memory_row, throughput_row, virtual_row
from benchmarks.peers.launch import TrialFailed, seen_by_processes
from benchmarks.peers.table import table
from benchmarks.peers.trial import Trial

ROWS = "abcd"
FORWARD_S, BACKWARD_S = 0.01, 0.02
SIZES = ((4, 8), (8, 32))
# (rounds, timed steps in each) by row; a step of (a) with 8 ranks takes more than a second.
FULL = {"a": (4, 4), "b": (10, 10), "c": (12, 5), "d": (1, 10)}
QUICK = {"a": (2, 2), "b": (2, 10), "c": (2, 5), "d": (1, 3)}
VIRTUAL_PEERS = ("pipeloom", "torch", "by_hand")
TOKENS_PER_STEP = 8 * 128  # batch_size × sequence_length of the default configuration
NUM_MICROBATCHES = 4


def virtual_trials(row: str, lengths: dict[str, tuple[int, int]]) -> Iterator[Trial]:
    waits = (FORWARD_S, BACKWARD_S) if row == "a" else (0.0, 0.0)
    for num_ranks, num_microbatches in SIZES:
        for schedule in ("gpipe", "1f1b"):
            shape = (schedule, num_ranks, num_microbatches)
            yield Trial(row, "virtual", *shape, VIRTUAL_PEERS, 2, *lengths[row], *waits)


def gpt_trial(lengths: dict[str, tuple[int, int]]) -> Trial:
    peers = ("pipeloom", "torch", "by_hand", "one_process", *(["deepspeed"] if has_deepspeed() else []))
    return Trial("c", "gpt", "1f1b", 2, NUM_MICROBATCHES, peers, 5, *lengths["c"])


def measure(row: str, lengths: dict[str, tuple[int, int]]) -> Iterator[Row | MemoryRow]:
    """Run the trials of one row of `ROWS`."""
    if row in "ab":
        for trial in virtual_trials(row, lengths):
            yield virtual_row(trial, seen_by_processes(trial))
    elif row == "c":
        trial = gpt_trial(lengths)
        yield throughput_row(trial, seen_by_processes(trial), TOKENS_PER_STEP)
    else:
        yield from memory(gpt_trial(lengths), *lengths["d"])


def memory(trial: Trial, num_rounds: int, num_steps: int) -> list[MemoryRow]:
    rows = []
    for peer in trial.peers:
        num_processes = 1 if peer == "one_process" else trial.num_processes
        alone = replace(trial, peers=(peer,), num_processes=num_processes, num_rounds=num_rounds, num_steps=num_steps)
        rows.append(memory_row(peer, seen_by_processes(alone)))
    return beside_torch(rows)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": round(os.getloadavg()[0], 1),
    }


def remark(found: dict[str, Any]) -> str:
    used = f"{found['num_cores']} cores, {found['system']}, Python {found['python']}, torch {found['torch']}"
    return (
        f"{used}; load average {found['load_average']} at the start.\n"
        "Medians of all timed steps, [quartiles]. Where ranks outnumber cores they wait for each other's turn, and\n"
        "whatever else the machine does is in the figures of all peers: compare them with each other, not between runs."
    )


def main() -> int:
    options = parse()
    lengths = QUICK if options.quick else FULL
    found, failures = machine(), {}
    rows: list[Row | MemoryRow] = []
    for row in options.rows:
        try:
            rows += measure(row, lengths)
        except TrialFailed as error:
            failures[row] = str(error)
    if options.json:
        print(json.dumps({"machine": found, "rows": [asdict(row) for row in rows], "failures": failures}, indent=2))
    else:
        print("\n\n".join(filter(None, [remark(found), table(rows)])))
    for row, cause in failures.items():
        print(f"\n({row}) failed:\n{cause}", file=sys.stderr)
    return 1 if failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=_rows, default=ROWS, help=f"which parts, by letter (default {ROWS})")
    parser.add_argument("--quick", action="store_true", help="few steps: whether it runs, rather than how fast")
    parser.add_argument("--json", action="store_true", help="print JSON; seconds and bytes")
    return parser.parse_args()


def _rows(given: str) -> str:
    if not given or set(given) - set(ROWS):
        raise argparse.ArgumentTypeError(f"{given!r} was given; some of the letters {ROWS} are needed")
    return "".join(sorted(set(given)))


if __name__ == "__main__":
    sys.exit(main())
