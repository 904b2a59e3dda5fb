"""One process of a trial, started by torchrun: ``-m benchmarks.torch_schedules.worker TRIAL_AS_JSON RESULT_FILE``.

Both live in the same processes and take turns: what else the machine does hits both alike. Every step begins with a
barrier. It lasts from there on the first rank, where every schedule begins, until the last rank has ended, by the
clock that the processes of a machine share.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.peers.launch import LIMIT_S
from benchmarks.torch_schedules.contestants import CONTESTANTS, Contestant
from benchmarks.torch_schedules.trial import Trial
from pipeloom.testing import VirtualStage

Spans = list[tuple[float, float]]
"""Per step, when this rank began and ended."""


def take_part(trial: Trial) -> dict[str, Spans]:
    """Run the trial in this process; all processes call it."""
    contestants = {name: make(trial) for name, make in CONTESTANTS.items()}
    spans: dict[str, Spans] = {name: [] for name in contestants}
    for contestant in contestants.values():  # torch exchanges shapes in its first step
        _turn(contestant, 2)
    for number in range(trial.num_rounds):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            spans[name] += _turn(contestants[name], trial.num_steps + 1)[1:]
    dist.barrier()
    for contestant in contestants.values():
        contestant.close()
    return spans


def _turn(contestant: Contestant, num_steps: int) -> Spans:
    found = []
    for _ in range(num_steps):
        dist.barrier()
        start_s = time.perf_counter()
        contestant.step()
        found.append((start_s, time.perf_counter()))
    return found


def steps_s(spans: list[dict[str, Spans]]) -> dict[str, list[float]]:
    """Seconds of each step, from what all ranks saw."""
    return {
        name: [
            max(end for _, end in ranks) - ranks[0][0] for ranks in zip(*(each[name] for each in spans), strict=True)
        ]
        for name in spans[0]
    }


def one_stage_s(trial: Trial) -> dict[str, float]:
    """What F, I and W of a single stage take when torch's own functions split its backward."""
    stage = VirtualStage(*trial.times_s)
    value = torch.zeros(1, 1, requires_grad=True)
    marks = [time.perf_counter()]
    output = stage(value)
    marks.append(time.perf_counter())
    _, groups = stage_backward_input([output], [torch.ones_like(output)], [value], iter(stage.parameters()))
    marks.append(time.perf_counter())
    stage_backward_weight(iter(stage.parameters()), groups)
    marks.append(time.perf_counter())
    return {kind: end - start for kind, start, end in zip("FIW", marks, marks[1:], strict=False)}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Per action, over runs; the first loads what torch loads on first use."""
    return {kind: statistics.median(run[kind] for run in runs) for kind in runs[0]}


def main() -> None:
    trial = Trial(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    one_stage = [one_stage_s(trial) for _ in range(5)]
    seen = take_part(trial)
    every: list[dict[str, Spans] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    if dist.get_rank() == 0:
        found = {"steps_s": steps_s([each for each in every if each]), "one_stage_s": medians(one_stage)}
        Path(sys.argv[2]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
