"""How close a step comes to its simulation, on devices that wait instead of computing.

    python -m benchmarks.virtual_devices [--steps 5] [--json]

For gpipe and 1f1b, 4 ranks × 8 micro-batches and 8 × 32, stages of 10 ms forward and 20 ms backward: the time of
`Pipeline.step` ÷ the simulated makespan, and the same for two things beside it that take turns with it in one run:

- bare threads that only sleep in the same pattern: what the machine's clock and its threads cost;
- loops of torch by hand, a thread per rank: the same stages with detach, backward and a queue, and nothing else. What
  they cost more than bare threads is autograd's; it is much on a thread that just woke up.

The figures compared are the medians' excesses over 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.relations import waits_for
from pipeloom.testing import virtual_costs, virtual_stages

FORWARD_S, BACKWARD_S = 0.01, 0.02
SLEEPS_S = {Kind.FORWARD: FORWARD_S, Kind.BACKWARD: BACKWARD_S}
SIZES = ((4, 8), (8, 32))


Work = Callable[[Action, list[Any]], Any]


def threads_s(schedule: Schedule, works: Sequence[Work]) -> float:
    """Seconds that one thread per rank takes for its program, each action waiting for what it waits for.

    Args:
        schedule: computations only.
        works: per rank what an action does with the values that came from other ranks; its value goes to them.
    """
    messages: dict[tuple[Action, Action], SimpleQueue[Any]] = {
        (need, action): SimpleQueue() for action in schedule for need in _remote_needs(schedule, action)
    }
    receivers: dict[Action, list[SimpleQueue[Any]]] = {}
    for (need, _), queue in messages.items():
        receivers.setdefault(need, []).append(queue)
    needs = {action: _remote_needs(schedule, action) for action in schedule}

    def run(rank: int) -> None:
        for action in schedule.program(rank):
            value = works[rank](action, [messages[need, action].get() for need in needs[action]])
            for queue in receivers.get(action, ()):
                queue.put(value)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(schedule.num_ranks)]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start_s


def sleeping(action: Action, _: list[Any]) -> None:
    """Only sleep."""
    time.sleep(SLEEPS_S[action.kind])


def by_hand(stage: nn.Module, first: Tensor) -> Work:
    """What a loop written for one stage does, with torch and nothing else."""
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def work(action: Action, received: list[Any]) -> Tensor | None:
        if action.kind is Kind.FORWARD:
            leaf = (received[0] if received else first).detach().requires_grad_()
            output = stage(leaf)
            held[action.microbatch] = leaf, output
            return output.detach()
        leaf, output = held.pop(action.microbatch)
        output.backward(received[0] if received else torch.ones_like(output))
        return leaf.grad

    return work


def _remote_needs(schedule: Schedule, action: Action) -> list[Action]:
    needs = waits_for(action, schedule.num_stages, schedule.actions)
    return [need for need in needs if schedule.rank_of(need.stage) != schedule.rank_of(action.stage)]


def compare(name: str, num_ranks: int, num_microbatches: int, num_steps: int) -> dict[str, Any]:
    """The three in turn, after one step of each that does not count."""
    schedule = pl.schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    stages = virtual_stages(num_ranks, FORWARD_S, BACKWARD_S)
    inputs = torch.zeros(num_microbatches, 1)
    times_s: dict[str, list[float]] = {"step": [], "bare_threads": [], "torch_by_hand": []}
    with pl.Pipeline(
        stages, schedule=name, num_microbatches=num_microbatches, loss_fn=lambda output: output.sum()
    ) as pipe:
        for _ in range(num_steps + 1):
            start_s = time.perf_counter()
            pipe.step(inputs)
            times_s["step"].append(time.perf_counter() - start_s)
            times_s["bare_threads"].append(threads_s(schedule, [sleeping] * num_ranks))
            times_s["torch_by_hand"].append(threads_s(schedule, [by_hand(stage, inputs[:1]) for stage in stages]))
    simulated_s = pl.simulate(schedule, virtual_costs(num_ranks, FORWARD_S, BACKWARD_S)).makespan_s
    over = {f"{what}_over_simulated": statistics.median(each[1:]) / simulated_s for what, each in times_s.items()}
    excess = {what: value - 1 for what, value in over.items()}
    return {
        "schedule": name,
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "simulated_s": simulated_s,
        **over,
        "excess_over_bare_threads": excess["step_over_simulated"] / excess["bare_threads_over_simulated"],
        "excess_over_torch_by_hand": excess["step_over_simulated"] / excess["torch_by_hand_over_simulated"],
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
    print("                                ÷ simulated makespan                      excess of step ÷ excess of")
    print("schedule  ranks  micro-batches  step    bare threads  torch by hand      bare threads  torch by hand")
    for row in rows:
        print(
            f"{row['schedule']:8}  {row['num_ranks']:5}  {row['num_microbatches']:13}  "
            f"{row['step_over_simulated']:.4f}  {row['bare_threads_over_simulated']:12.4f}  "
            f"{row['torch_by_hand_over_simulated']:13.4f}      {row['excess_over_bare_threads']:12.2f}  "
            f"{row['excess_over_torch_by_hand']:13.2f}"
        )


if __name__ == "__main__":
    main()
