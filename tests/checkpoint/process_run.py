"""What each process of a test runs: some steps of a tied model, from a checkpoint or from the start.

``process_run.py FOLDER NUM_STAGES SCHEDULE LOAD_STEP LAST_STEP [MOMENT]``: loads a step (0: none), saves every second
one. The process of rank 1 is killed as it brings the MOMENT-th file to the disk.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.checkpoint import CheckpointStore, Saver, load_checkpoint, save_checkpoint
from tests.archive.samples import die_at


class Head(nn.Module):
    """Shares its weight with the embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight)


def model() -> nn.Sequential:
    """Embedding, layers with dropout and running statistics, and a head that is tied to the embedding."""
    embedding = nn.Embedding(11, 8)
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 8)]
    return nn.Sequential(embedding, *layers, Head(embedding.weight))


def run(folder: Path, num_stages: int, schedule: str, load_step: int, last_step: int) -> None:
    """Train up to ``last_step``; checkpoints go to ``folder``."""
    torch.manual_seed(load_step)  # what is loaded does not depend on what was there
    pipe = pl.Pipeline(
        model(), num_stages=num_stages, schedule=schedule, num_microbatches=3, loss_fn=nn.functional.cross_entropy
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    store = CheckpointStore(folder, num_kept=9)
    extra: dict[str, Any] = {"position": 0}
    if load_step:
        extra = load_checkpoint(store.path_of(load_step), pipe, optimizer, scheduler=scheduler)
    with pipe, Saver(CheckpointStore(folder / f"from-{load_step}-{num_stages}", num_kept=9), pipe.group) as saver:
        for _ in range(pipe.step_index, last_step):
            inputs = (torch.arange(12) + extra["position"]) % 11
            pipe.step(inputs, target=inputs.flip(0))
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            extra["position"] += 5
            if pipe.step_index % 2 == 0:
                save_checkpoint(saver, pipe, optimizer, scheduler=scheduler, extra=extra)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[6:] and os.environ["RANK"] == "1":
        die_at(int(sys.argv[6]))
    run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
