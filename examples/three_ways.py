"""One file, three ways: in a notebook, as a plain script, and as one process per stage under torchrun.

    python examples/three_ways.py
    torchrun --nproc-per-node 4 examples/three_ways.py

All of them print the same numbers, to the bit: dropout and a weight that the first and the last stage share included.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

import pipeloom as pl

LENGTH, WIDTH = 32, 48
TEXT = torch.tensor(list((pl.Pipeline.__doc__ or "").encode("ascii", "replace")))


class Block(nn.Module):
    """Mixes each byte with the one before it: (batch, length, width) → the same."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(2 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.mix = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.mix(torch.cat((x, before), dim=-1))  # type: ignore[no-any-return]


def model() -> nn.Sequential:
    """Bytes (batch, length) → logits of the next byte (batch, length, 128)."""
    embedding, head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128, bias=False)
    head.weight = embedding.weight  # in two stages; its gradient is summed between them
    return nn.Sequential(embedding, *(Block() for _ in range(6)), nn.LayerNorm(WIDTH), head)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Windows of the text and the same a byte later, (24, length) each: the same ones in every process."""
    starts = torch.randint(len(TEXT) - LENGTH, (24, 1), generator=torch.Generator().manual_seed(step))
    places = starts + torch.arange(LENGTH)
    return TEXT[places], TEXT[places + 1]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Nats per byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main(num_steps: int = 40) -> list[float]:
    """Train; return the losses, which every process has."""
    torch.manual_seed(0)  # every process makes the same model, and keeps its own stage
    pipe = pl.Pipeline(model(), num_stages=4, schedule="1f1b", num_microbatches=6, loss_fn=loss_fn)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=3e-3)
    losses = []
    for step in range(num_steps):
        inputs, target = batch(step)
        losses.append(float(pipe.step(inputs, target=target)))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights = pipe.full_state_dict(to=0)  # all processes call it, one gets them
    if pipe.group.rank == 0:
        found = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()
        print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f} nats per byte; weights {found[:16]}")
    pipe.close()
    return losses


if __name__ == "__main__":
    main()
