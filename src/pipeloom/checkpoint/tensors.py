"""Named tensors in safetensors files.

``torch.save`` writes a pickle, and loading one can run anything. safetensors holds only numbers, but it
refuses tensors that share memory; a tied parameter is therefore written once and its other names are kept
in the file's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeloom.checkpoint.folder import OTHER_HINT
from pipeloom.errors import CheckpointError

_TIED: Final = "tied"


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to one file; names that are one tensor (same memory, same view) are written once.

    Raises:
        CheckpointError: the file cannot be written.
    """
    first_name: dict[tuple[object, ...], str] = {}
    written: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        owner = first_name.setdefault(_identity(name, tensor), name)
        if owner == name:
            written[name] = _own_memory(tensor)
        else:
            tied[name] = owner
    # safetensors writes the metadata's keys in no fixed order: one key keeps equal files equal.
    metadata = {_TIED: json.dumps(tied)} if tied else {"format": "pt"}
    try:
        save_file(written, path, metadata)
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, on the CPU; tied names are the same tensor object again.

    Raises:
        CheckpointError: the file is not a safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            tied = json.loads((file.metadata() or {}).get(_TIED, "{}"))
        return tensors | {name: tensors[owner] for name, owner in tied.items()}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}", OTHER_HINT) from None


def _identity(name: str, tensor: Tensor) -> tuple[object, ...]:
    if tensor.numel() == 0:
        return (name,)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _own_memory(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, contiguous, in a storage that holds nothing else."""
    tensor = tensor.detach().to("cpu").contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
