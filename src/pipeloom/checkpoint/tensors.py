"""Tensors as bytes and back.

``torch.save`` writes a pickle, and loading one can run anything. safetensors holds only numbers, but it refuses
tensors that share memory: a tied parameter is written once, and its other names stand in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeloom.archive.shard import DTYPES, Form
from pipeloom.errors import CheckpointError

_NAMES: Final = {getattr(torch, name): name for name in DTYPES}


def form_of(tensor: Tensor, name: str) -> Form:
    """Return a tensor's dtype and shape.

    Raises:
        CheckpointError: a checkpoint cannot hold it: another dtype, or no dense values.
    """
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_meta:
        what = "on the meta device" if tensor.is_meta else f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
        raise CheckpointError(
            f"{name!r} is a tensor that cannot be saved: {what}", f"dense ones can be, of {', '.join(DTYPES)}"
        )
    return Form(dtype, tuple(tensor.shape))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the values of a tensor on the CPU, row by row; they are copied only if they do not lie so."""
    values = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return values.numpy().data


def identity_of(name: str, tensor: Tensor) -> tuple[object, ...]:
    """Return what two names of the same tensor (same memory, same view) have in common."""
    if tensor.numel() == 0:
        return (name,)
    seen_as = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), *seen_as


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors of a shard, on the CPU; what is not asked for is not read.

    Raises:
        CheckpointError: the file is no safetensors file, or has no such tensor.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None
