"""How close a step comes to its simulation, on devices that wait instead of computing.

    python -m benchmarks.virtual_devices [--steps 5] [--json]

For gpipe and 1f1b, 4 ranks × 8 micro-batches and 8 × 32, stages of 10 ms forward and 20 ms backward: the time of
`Pipeline.step` ÷ the simulated makespan, and the same for bare threads that only sleep in the same pattern. The two
take turns in one run, and the figure is the ratio of the medians' excesses over 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from queue import SimpleQueue
from typing import Any

import torch

import pipeloom as pl
from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.relations import waits_for
from pipeloom.testing import virtual_costs, virtual_stages

FORWARD_S, BACKWARD_S = 0.01, 0.02
SLEEPS_S = {Kind.FORWARD: FORWARD_S, Kind.BACKWARD: BACKWARD_S}
SIZES = ((4, 8), (8, 32))


def bare_threads_s(schedule: Schedule) -> float:
    """Seconds that threads take which sleep as long as each action, and wait for what it waits for."""
    messages: dict[tuple[Action, Action], SimpleQueue[None]] = {
        (need, action): SimpleQueue() for action in schedule for need in _remote_needs(schedule, action)
    }
    receivers: dict[Action, list[SimpleQueue[None]]] = {}
    for (need, _), queue in messages.items():
        receivers.setdefault(need, []).append(queue)

    def work(rank: int) -> None:
        for action in schedule.program(rank):
            for need in _remote_needs(schedule, action):
                messages[need, action].get()
            time.sleep(SLEEPS_S[action.kind])
            for queue in receivers.get(action, ()):
                queue.put(None)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(schedule.num_ranks)]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start_s


def _remote_needs(schedule: Schedule, action: Action) -> list[Action]:
    needs = waits_for(action, schedule.num_stages, schedule.actions)
    return [need for need in needs if schedule.rank_of(need.stage) != schedule.rank_of(action.stage)]


def compare(name: str, num_ranks: int, num_microbatches: int, num_steps: int) -> dict[str, Any]:
    """Pipeloom and bare threads in turn, after one step of each that does not count."""
    schedule = pl.schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    costs = virtual_costs(num_ranks, FORWARD_S, BACKWARD_S)
    inputs = torch.zeros(num_microbatches, 1)
    step_s, bare_s = [], []
    with pl.Pipeline(
        virtual_stages(num_ranks, FORWARD_S, BACKWARD_S),
        schedule=name,
        num_microbatches=num_microbatches,
        loss_fn=lambda output: output.sum(),
    ) as pipe:
        for _ in range(num_steps + 1):
            start_s = time.perf_counter()
            pipe.step(inputs)
            step_s.append(time.perf_counter() - start_s)
            bare_s.append(bare_threads_s(schedule))
    simulated_s = pl.simulate(schedule, costs).makespan_s
    ours = statistics.median(step_s[1:]) / simulated_s
    bare = statistics.median(bare_s[1:]) / simulated_s
    return {
        "schedule": name,
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "simulated_s": simulated_s,
        "step_over_simulated": ours,
        "bare_over_simulated": bare,
        "excess_ratio": (ours - 1) / (bare - 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = [compare(name, *size, options.steps) for size in SIZES for name in ("gpipe", "1f1b")]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print("schedule  ranks  micro-batches  step/simulated  bare threads/simulated  ratio of excesses")
    for row in rows:
        print(
            f"{row['schedule']:8}  {row['num_ranks']:5}  {row['num_microbatches']:13}  "
            f"{row['step_over_simulated']:14.4f}  {row['bare_over_simulated']:22.4f}  {row['excess_ratio']:17.2f}"
        )


if __name__ == "__main__":
    main()
