"""How many actions a second does the simulator take, and does its time grow as the number of actions does?

    python -m benchmarks.simulator [--json] [--repeats 3]

Linear means that the time per action stays: the last column is the time per action over that of the smallest
size. Needed: 500,000 actions a second, the `Timeline` included. Below stands how long a large schedule takes from its
name to its timeline: interleaved, 64 ranks × 512 micro-batches × 2 stages per rank. Needed: 10 s. Seconds are those of
the process, for it never waits: what else the machine does should not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pipeloom.cost import Costs
from pipeloom.ir import Schedule
from pipeloom.ir.verify import require_valid
from pipeloom.passes import add_transfers
from pipeloom.schedules import schedule
from pipeloom.sim import simulate

SHAPES = ((8, 64), (16, 256), (32, 1024), (64, 2048))
LARGE = (64, 512)
NEEDED_PER_S = 500_000
NEEDED_S = 10


@dataclass(frozen=True)
class Row:
    """One schedule, simulated as often as asked; the best time counts."""

    schedule: str
    has_transfers: bool
    num_ranks: int
    num_microbatches: int
    num_actions: int
    best_s: float
    actions_per_s: float
    time_per_action_ratio: float


def main() -> None:
    """Print a row for each schedule and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="simulations of each; best counts")
    options = parser.parse_args()
    large = whole()
    found = [row for name in ("gpipe", "1f1b") for low in (False, True) for row in rows(name, low, options.repeats)]
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in found], "large": large}, indent=2))
        return
    print(
        f"{'schedule':<10}{'transfers':<11}{'ranks':>6}{'micro-batches':>15}{'actions':>10}{'actions/s':>12}{'ratio':>7}"
    )
    for row in found:
        print(
            f"{row.schedule:<10}{'yes' if row.has_transfers else 'no':<11}{row.num_ranks:>6}"
            f"{row.num_microbatches:>15}{row.num_actions:>10,}{row.actions_per_s:>12,.0f}"
            f"{row.time_per_action_ratio:>7.2f}"
        )
    slowest = min(row.actions_per_s for row in found)
    print(f"slowest: {slowest:,.0f} actions/s; needed: {NEEDED_PER_S:,}")
    parts = ", ".join(f"{part.removesuffix('_s')} {each_s:.2f} s" for part, each_s in large.items())
    print(f"{LARGE[0]} ranks x {LARGE[1]} micro-batches x 2 stages per rank: {parts}; needed: {NEEDED_S} s together")


def whole() -> dict[str, float]:
    """Seconds for each of three: a large schedule is generated, verified, and simulated."""
    num_ranks, num_microbatches = LARGE
    start_s = time.process_time()
    made = schedule("interleaved", num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=2)
    generated_s = time.process_time()
    require_valid(made)
    verified_s = time.process_time()
    return {
        "generated_s": generated_s - start_s,
        "verified_s": verified_s - generated_s,
        "simulated_s": seconds(made),
    }


def rows(name: str, has_transfers: bool, repeats: int) -> Iterator[Row]:
    """One row per size, from small to large."""
    first = None
    for num_ranks, num_microbatches in SHAPES:
        plain = schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        made = add_transfers(plain) if has_transfers else plain
        best_s = min(seconds(made) for _ in range(repeats))
        each_s = best_s / len(made)
        first = first or each_s
        yield Row(name, has_transfers, num_ranks, num_microbatches, len(made), best_s, 1 / each_s, each_s / first)


def seconds(made: Schedule) -> float:
    """Seconds of one simulation with every kind of cost but a bandwidth."""
    costs = Costs.uniform(
        made.num_stages,
        forward_s=0.011,
        input_grad_s=0.012,
        weight_grad_s=0.009,
        transfer_s=0.001,
        bytes_held_to_input_grad=34,
        bytes_held_to_weight_grad=12,
    )
    start = time.process_time()
    simulate(made, costs)
    return time.process_time() - start


if __name__ == "__main__":
    main()
