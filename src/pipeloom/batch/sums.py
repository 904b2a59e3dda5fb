"""Gradients that find each other outside of autograd, which adds up what it finds itself."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def added(earlier: Tensor | None, new: Tensor) -> Tensor:
    """As autograd accumulates: in place where it can be, and torch adds a dense tensor to a sparse one in no order."""
    if earlier is None:
        return new
    return new + earlier if earlier.is_sparse and not new.is_sparse else earlier.add_(new)
