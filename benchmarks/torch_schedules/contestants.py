"""The three: two libraries, each used as its own documentation says, and what is left without any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

import pipeloom as pl
from benchmarks.devices.threads import by_hand as works_by_hand
from benchmarks.torch_schedules.by_hand import HandMade, connected
from benchmarks.torch_schedules.trial import CLASSES, Trial
from pipeloom.testing import virtual_stages


@dataclass(frozen=True)
class Contestant:
    """What a user's loop does with one batch, and how what holds connections is freed."""

    step: Callable[[], object]
    close: Callable[[], None] = lambda: None


def mean_output(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def pipeloom(trial: Trial) -> Contestant:
    """All stages in every process, as in a script of one's own; `Pipeline` keeps those of its rank."""
    made, zeros = trial.made, torch.zeros(trial.num_microbatches, 1)
    pipe = pl.Pipeline(
        virtual_stages(made.num_stages, *trial.times_s),
        schedule=made,
        num_microbatches=trial.num_microbatches,
        loss_fn=mean_output,
    )
    return Contestant(lambda: pipe.step(zeros, target=zeros), pipe.close)


def torch_pipelining(trial: Trial) -> Contestant:
    """Inputs where the first stage is, target and losses where the last one is; unread outputs are not merged."""
    made, rank, zeros = trial.made, dist.get_rank(), torch.zeros(trial.num_microbatches, 1)
    own, last = made.placement.stages_of(rank), made.num_stages - 1
    modules, group = virtual_stages(made.num_stages, *trial.times_s), dist.new_group()
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(modules[i], i, made.num_stages, device, group=group) for i in own]
    kind: Any = getattr(pipelining, CLASSES[trial.schedule])
    given: Any = stages[0] if trial.schedule in ("gpipe", "1f1b") else stages
    schedule = kind(given, trial.num_microbatches, loss_fn=mean_output)
    args = (zeros,) if 0 in own else ()

    def step() -> None:
        losses: dict[str, Any] = {"target": zeros, "losses": []} if last in own else {}
        schedule.step(*args, return_outputs=False, **losses)

    return Contestant(step)


def by_hand(trial: Trial) -> Contestant:
    """A loop for this very rank and no other purpose; nothing is checked, counted, or noted."""
    made, rank = trial.made, dist.get_rank()
    work = works_by_hand(virtual_stages(made.num_stages, *trial.times_s), torch.zeros(1, 1))
    loop = HandMade(made, rank, connected(rank, made.num_ranks), work)
    return Contestant(loop.step, loop.close)


CONTESTANTS: dict[str, Callable[[Trial], Contestant]] = {
    "pipeloom": pipeloom,
    "torch": torch_pipelining,
    "by_hand": by_hand,
}
