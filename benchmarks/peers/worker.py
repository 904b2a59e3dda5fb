"""One process of a trial, started by torchrun: ``-m benchmarks.peers.worker TRIAL_AS_JSON RESULT_FILE``.

All peers live in the same processes and take turns, block by block: what else the machine does hits all alike. Steps
are timed on the first process, where both schedules begin and end.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.contestants import CONTESTANTS, Contestant
from benchmarks.peers.launch import LIMIT_S
from benchmarks.peers.trial import Trial, batches, part


@dataclass
class Run:
    """One peer in one process, and what was seen of it."""

    contestant: Contestant
    batches: Iterator[tuple[Tensor, Tensor]]
    steps_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    losses: list[float] = field(default_factory=list)

    def turn(self, num_steps: int, *, is_timed: bool) -> None:
        """Run steps as a user's loop does, nothing between them; one more before them if they are timed."""
        dist.barrier()
        torch.set_num_threads(self.contestant.num_threads)
        if is_timed:
            self.step()
        start_cpu_s = time.process_time()
        times_s = [self.step() for _ in range(num_steps)]
        if is_timed:
            self.steps_s += times_s
            self.cpu_s += time.process_time() - start_cpu_s
        torch.set_num_threads(1)

    def step(self) -> float:
        """Return the seconds of one step, the loop around it included."""
        start_s = time.perf_counter()
        inputs, targets = next(self.batches)
        loss = self.contestant.learn(inputs, targets)
        self.contestant.finish()
        if loss is not None:
            self.losses.append(float(loss))
        return time.perf_counter() - start_s


@dataclass(frozen=True)
class Seen:
    """What one process has seen of a trial.

    Attributes:
        steps_s: seconds of each timed step, by peer.
        cpu_s: of this process, in all its threads, over a peer's timed steps.
        losses: of all steps, by peer; none where the peer does not tell this process.
        idle_peak_bytes: the process's peak memory before any peer was there.
        peak_bytes: and at the end.
    """

    steps_s: dict[str, list[float]]
    cpu_s: dict[str, float]
    losses: dict[str, list[float]]
    idle_peak_bytes: int | None
    peak_bytes: int | None


def take_part(trial: Trial) -> Seen:
    """Run the trial in this process; all processes call it."""
    idle_peak_bytes = peak_bytes()
    runs = {name: _run(trial, name) for name in trial.peers}
    for run in runs.values():
        run.turn(trial.num_warmup_steps, is_timed=False)
    gc.collect()
    for number in range(trial.num_rounds):
        for run in list(runs.values())[:: -1 if number % 2 else 1]:
            run.turn(trial.num_steps, is_timed=True)
    dist.barrier()
    seen = Seen(
        {name: run.steps_s for name, run in runs.items()},
        {name: run.cpu_s for name, run in runs.items()},
        {name: run.losses for name, run in runs.items()},
        idle_peak_bytes,
        peak_bytes(),
    )
    for run in runs.values():
        run.contestant.close()
    return seen


def _run(trial: Trial, name: str) -> Run:
    made = part(trial, dist.get_rank(), dist.new_group())
    return Run(CONTESTANTS[name](made), batches(trial))


def peak_bytes() -> int | None:
    """VmHWM, the most memory that this process had resident; None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    kibibytes = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(kibibytes[0]) * 1024 if kibibytes else None


def main() -> None:
    trial_text, result_file = sys.argv[1:]
    given = json.loads(trial_text)
    torch.set_num_threads(1)
    # Whoever waits for his turn waits as long as the others' take; a trial that hangs is ended by `launch`.
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    seen = take_part(Trial(**given | {"peers": tuple(given["peers"])}))
    every: list[Seen | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    if dist.get_rank() == 0:
        Path(result_file).write_text(json.dumps([asdict(each) for each in every if each]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
