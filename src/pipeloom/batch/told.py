"""Losses of one step that are found in two processes: each tells the others, and all come to the same total."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pipeloom.batch.losses import StepLoss

Told = Mapping[int, tuple[float, str, float | None]]
"""Per micro-batch: its loss, the loss's dtype, and what it counts if the loss function said that."""


def told(loss: StepLoss) -> Told:
    """What was found in this process, in plain values."""
    return {
        i: (value.item(), str(value.dtype).removeprefix("torch."), loss.returned_counts.get(i))
        for i, value in loss.values.items()
    }


def hear(loss: StepLoss, said: Told) -> None:
    """Take over losses of micro-batches whose last stage ran in another process."""
    for microbatch, (value, dtype, count) in said.items():
        loss.values[microbatch] = torch.tensor(value, dtype=getattr(torch, dtype))
        if count is not None:
            loss.returned_counts[microbatch] = count
