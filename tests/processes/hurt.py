"""A training loop that one rank spoils, in some way, at some moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.checkpoint import CheckpointStore, save_checkpoint
from tests.processes.ranks import note_failure

NUM_MICROBATCHES = 6
WIDTH = 8


@dataclass(frozen=True)
class Hurt:
    """What happens to rank 1, in its second step."""

    kind: str
    moment: str
    folder: Path
    limit_s: float = 60.0

    def strike(self) -> None:
        """Let it happen."""
        note_failure(self.folder)
        if self.kind == "raise":
            raise ValueError("the user's own mistake")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stop":
            subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "stall":
            time.sleep(3600)


class _Struck(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, layer):
        ctx.layer = layer
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.layer.come_to("backward")
        return grad, None


class Layer(nn.Module):
    """A linear layer that is struck in a forward or a backward."""

    def __init__(self, hurt: Hurt | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.hurt = hurt
        self.counts = {"forward": 0, "backward": 0}

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → the same."""
        self.come_to("forward")
        return _Struck.apply(self.linear(x), self)

    def come_to(self, what: str) -> None:
        """Strike in the first forward, the third backward, or the last one, of the second step."""
        self.counts[what] += 1
        moments = {("forward", 1): "warm-up", ("backward", 3): "steady", ("backward", NUM_MICROBATCHES): "cool-down"}
        moment = moments.get((what, self.counts[what] - NUM_MICROBATCHES))
        if self.hurt and moment == self.hurt.moment:
            self.hurt.strike()


def train(hurt: Hurt, num_ranks: int) -> None:
    """Three steps, with a checkpoint after each."""
    torch.manual_seed(0)
    layers = [Layer(hurt if rank == 1 else None) for rank in range(num_ranks)]
    options = {"num_microbatches": NUM_MICROBATCHES, "loss_fn": nn.MSELoss(), "wait_limit_s": hurt.limit_s}
    pipe = pl.Pipeline(nn.Sequential(*layers), num_stages=num_ranks, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step_index in range(3):
        pipe.step(torch.ones(12, WIDTH), target=torch.zeros(12, WIDTH))
        for moment in ("optimizer", "checkpoint"):
            if hurt.moment == moment and pipe.group.rank == 1 and step_index == 1:
                hurt.strike()
            elif moment == "optimizer":
                optimizer.step()
                optimizer.zero_grad()
            else:
                save_checkpoint(CheckpointStore(hurt.folder / "checkpoints"), pipe, optimizer)
    sys.stdout.write("trained\n")
