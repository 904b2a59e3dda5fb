"""A few numbers of a batch in one, to tell whether all ranks were given the same (contract 9)."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from pipeloom.batch.trees import flatten
from pipeloom.runtime.context import StepContext

_NUM_SAMPLES = 64


def checksum_of(context: StepContext) -> int:
    """Of the batch: how it is cut, shapes, dtypes, and some of the numbers."""
    checksum = zlib.crc32(str([each.num_samples for each in context.inputs]).encode())
    for leaf in flatten(context.batch)[0]:
        checksum = zlib.crc32(_sample(leaf), checksum)
    return checksum


def _sample(leaf: Any) -> bytes:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__.encode()
    text = f"{leaf.dtype}{tuple(leaf.shape)}".encode()
    if leaf.device.type != "cpu" or leaf.layout is not torch.strided or not leaf.dim():
        return text  # reading a GPU's would wait for it
    per_dimension = max(2, round(_NUM_SAMPLES ** (1 / leaf.dim())))
    chosen = leaf.detach()[tuple(slice(None, None, max(1, size // per_dimension)) for size in leaf.shape)]
    return text + chosen.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
