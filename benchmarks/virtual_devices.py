"""How close a step comes to its simulation, on devices that wait instead of computing.

    python -m benchmarks.virtual_devices [--schedules 1f1b,zb-v] [--sizes 4x8,8x32] [--steps 5] [--json]

For every schedule that the runtime runs, 4 ranks × 8 micro-batches and 8 × 32, stages that wait 10 ms for F, I and W
each, and 20 ms for B: the time of `Pipeline.step` ÷ the simulated makespan, and the same for what stands beside it and
takes turns with it in one run:

- bare threads that only sleep in the same pattern: what the machine's clock and its threads cost;
- loops of torch by hand, a thread per rank: the same stages with detach, backward and a queue, and nothing else. What
  they cost more than bare threads is autograd's; it is much on a thread that just woke up;
- stages alone: the makespan simulated with what F, B, I and W of a single stage take, one after another on a thread of
  its own. Nothing is passed on and nobody is waited for: it is about what autograd takes by itself.

The figures compared are the medians' excesses over 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import pipeloom as pl
from benchmarks.devices.sizes import sizes
from benchmarks.devices.threads import by_hand, sleeping, threads_s
from pipeloom.cost import Costs
from pipeloom.errors import PipeloomError
from pipeloom.ir import Action, Kind
from pipeloom.schedules.registry import ENTRIES
from pipeloom.testing import virtual_costs, virtual_stages

TIMES_S = (0.01, 0.02, 0.01)
"""Of F, of B, and of W, whose time is a part of B's."""
SIZES = ((4, 8), (8, 32))
ALONE_PER_STEP = 4
Row = dict[str, Any]


def compare(name: str, num_ranks: int, num_microbatches: int, num_steps: int) -> Row:
    """All in turn, after two steps of each that do not count.

    Raises:
        PipeloomError: there is no such schedule of that size, or the runtime does not run it.
    """
    schedule = pl.schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    costs = virtual_costs(schedule.num_stages, *TIMES_S)
    inputs = torch.zeros(num_microbatches, 1)
    steps_s: dict[str, list[float]] = {"step": [], "bare_threads": [], "torch_by_hand": []}
    is_split = not any(action.kind is Kind.BACKWARD for action in schedule)
    alone_s: list[tuple[float, float, float]] = []
    with pl.Pipeline(
        virtual_stages(schedule.num_stages, *TIMES_S),
        schedule=schedule,
        num_microbatches=num_microbatches,
        loss_fn=lambda output: output.sum(),
    ) as pipe:
        for _ in range(num_steps + 2):
            start_s = time.perf_counter()
            pipe.step(inputs)
            steps_s["step"].append(time.perf_counter() - start_s)
            hands = [by_hand(virtual_stages(schedule.num_stages, *TIMES_S), inputs[:1]) for _ in range(num_ranks)]
            steps_s["bare_threads"].append(threads_s(schedule, [sleeping(costs)] * num_ranks))
            steps_s["torch_by_hand"].append(threads_s(schedule, hands))
            alone_s += [stage_alone_s(is_split=is_split) for _ in range(ALONE_PER_STEP)]
    forward_s, input_grad_s, weight_grad_s = map(statistics.median, zip(*alone_s[2 * ALONE_PER_STEP :], strict=True))
    alone = Costs.uniform(
        schedule.num_stages, forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s
    )
    return figures(steps_s, pl.simulate(schedule, alone).makespan_s, pl.simulate(schedule, costs).makespan_s)


def stage_alone_s(*, is_split: bool) -> tuple[float, float, float]:
    """Seconds of F, I and W of one stage, on the thread that calls; where B is whole, each has half of it."""
    work = by_hand(virtual_stages(1, *TIMES_S), torch.zeros(1, 1))
    kinds = (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) if is_split else (Kind.FORWARD, Kind.BACKWARD)
    marks = [time.perf_counter()]
    for kind in kinds:
        work(Action(kind, 0, 0), [])
        marks.append(time.perf_counter())
    forward_s, *backward_s = (end - start for start, end in itertools.pairwise(marks))
    return (forward_s, *backward_s) if is_split else (forward_s, backward_s[0] / 2, backward_s[0] / 2)


def figures(steps_s: dict[str, list[float]], alone_s: float, simulated_s: float) -> Row:
    """Medians without the first two steps, and their excesses beside each other."""
    over = {what: statistics.median(each[2:]) / simulated_s for what, each in steps_s.items()}
    over["stages_alone"] = alone_s / simulated_s
    excess = {what: value - 1 for what, value in over.items()}
    return {
        "simulated_s": simulated_s,
        **{f"{what}_over_simulated": value for what, value in over.items()},
        "excess_over_bare_threads": excess["step"] / excess["bare_threads"],
        "excess_over_torch_by_hand": excess["step"] / excess["torch_by_hand"],
    }


def row(name: str, size: tuple[int, int], num_steps: int) -> Row:
    """One line of the table: the figures, or why there are none."""
    head = {"schedule": name, "num_ranks": size[0], "num_microbatches": size[1]}
    try:
        return head | compare(name, *size, num_steps)
    except PipeloomError as error:
        return head | {"not_run": str(error)}


def line(row: Row) -> str:
    head = f"{row['schedule']:15}  {row['num_ranks']:5}  {row['num_microbatches']:13}  "
    if "not_run" in row:
        return head + "not run: " + row["not_run"].splitlines()[0]
    return (
        f"{head}{row['step_over_simulated']:.4f}  {row['bare_threads_over_simulated']:12.4f}  "
        f"{row['torch_by_hand_over_simulated']:13.4f}  {row['stages_alone_over_simulated']:12.4f}      "
        f"{row['excess_over_bare_threads']:12.2f}  "
        f"{row['excess_over_torch_by_hand']:13.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    rows = []
    if not options.json:
        print(" " * 39 + "÷ simulated makespan" + " " * 36 + "excess of step ÷ that of")
        heads = "bare threads  torch by hand"
        print(f"schedule         ranks  micro-batches  step    {heads}  stages alone      {heads}")
    for size in options.sizes:
        for name in options.schedules:
            rows.append(row(name, size, options.steps))
            if not options.json:
                print(line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.virtual_devices",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedules", type=_names, default=list(ENTRIES), help="names with commas (default all)")
    parser.add_argument("--sizes", type=sizes, default=SIZES, help="ranks x micro-batches (default 4x8,8x32)")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(arguments)


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",")]


if __name__ == "__main__":
    main()
