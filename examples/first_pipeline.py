"""A small model learns two spirals through a four-stage pipeline, and the same without one, to the same bits."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

import pipeloom as pl

NUM_MICROBATCHES = 6


def spirals(num_points: int) -> tuple[Tensor, Tensor]:
    """Points (num_points, 2) on two spirals, and which of them each is on, (num_points,)."""
    turn = torch.rand(num_points)
    which = torch.arange(num_points) % 2
    angle = 2 * math.pi * (turn + which / 2)
    return torch.stack((turn * angle.cos(), turn * angle.sin()), dim=1), which


def model() -> nn.Sequential:
    """2 → 64 → … → 2, eight layers."""
    hidden = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(nn.Linear(2, 64), nn.GELU(), *hidden, nn.Linear(64, 2))


def main(num_steps: int = 200) -> tuple[float, float]:
    """Train both ways; return the first and the last loss."""
    torch.manual_seed(0)
    whole = model()
    pipe = pl.Pipeline(
        copy.deepcopy(whole),
        num_stages=4,
        schedule="1f1b",
        num_microbatches=NUM_MICROBATCHES,
        loss_fn=nn.functional.cross_entropy,
    )
    ours = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    losses = []
    for _ in range(num_steps):
        points, which = spirals(192)
        losses.append(float(pipe.step(points, target=which)))
        ours.step()
        ours.zero_grad()
        for part, target in zip(points.chunk(NUM_MICROBATCHES), which.chunk(NUM_MICROBATCHES), strict=True):
            loss = nn.functional.cross_entropy(whole(part), target)
            loss.backward(torch.full_like(loss, len(part) / len(points)))
        theirs.step()
        theirs.zero_grad()
    same = all(torch.equal(a, b) for a, b in zip(pipe.parameters(), whole.parameters(), strict=True))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; weights equal to the bit: {same}")
    pipe.close()
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
