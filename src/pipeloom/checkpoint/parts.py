"""A snapshot taken apart by stage: what a process copies, and what it writes into which file.

One file for a rank would bind a checkpoint to the ranks that wrote it. A stage's file is the same whoever held it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.archive.manifest import (
    MODEL_SHARD,
    OPTIMIZER_SHARD,
    Contents,
    FileRecord,
    Manifest,
    TensorRecord,
    shard_of,
)
from pipeloom.archive.shard import write_shard
from pipeloom.checkpoint.snapshot import CONFIGURATION, Snapshot
from pipeloom.checkpoint.tensors import bytes_of, form_of, identity_of
from pipeloom.checkpoint.values import encode


@dataclass(frozen=True)
class Part:
    """What one stage has.

    Attributes:
        names: of the model's entries, in its order.
        tensors: suffix of the file → name in it → tensor.
        values: "model" and "optimizer" → name → JSON.
        tied: name → the name under which the same tensor is written.
        groups: hyperparameters, as JSON.
    """

    names: list[str] = field(default_factory=list)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=lambda: {MODEL_SHARD: {}, OPTIMIZER_SHARD: {}})
    values: dict[str, dict[str, Any]] = field(default_factory=lambda: {"model": {}, "optimizer": {}})
    tied: dict[str, str] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def write(self, folder: Path, stage: int, step_index: int) -> Contents:
        """Write both files of a stage; they are on the disk when this returns.

        Raises:
            OSError: the disk refuses.
        """
        contents = Contents(tied=self.tied, values=self.values, groups=self.groups, stages={str(stage): self.names})
        for suffix, tensors in self.tensors.items():
            file = shard_of(stage, suffix)
            written = {name: (form_of(tensor, name), bytes_of(tensor)) for name, tensor in tensors.items()}
            metadata = {"format": "pt", "stage": str(stage), "step_index": str(step_index)}
            contents.files[file] = FileRecord(*write_shard(folder / file, written, metadata))
            records = contents.model if suffix == MODEL_SHARD else contents.optimizer
            records |= {name: TensorRecord(file, form.dtype, form.shape) for name, (form, _) in written.items()}
        return contents


@dataclass
class Copies:
    """Copies in the CPU's memory, which is used again from one snapshot to the next."""

    _memory: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def of(self, parts: Mapping[int, Part]) -> dict[int, Part]:
        """Return the parts with copies of their tensors; until the next call, nothing else writes into those."""
        kept: dict[tuple[str, str], Tensor] = {}
        for (suffix, name), tensor in _entries(parts):
            kept[suffix, name] = memory = self._room((suffix, name), tensor)
            memory.copy_(tensor, non_blocking=True)
        self._memory = kept
        for device in {tensor.device for _, tensor in _entries(parts) if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return {stage: self._copied(part) for stage, part in parts.items()}

    def reserve(self, parts: Mapping[int, Part]) -> None:
        """Get the memory, and touch it: the system hands it out page by page, when it is written to."""
        self._memory = {key: self._room(key, tensor).zero_() for key, tensor in _entries(parts)}

    def _room(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        memory = self._memory.get(key)
        if memory is not None and (memory.shape, memory.dtype) == (tensor.shape, tensor.dtype):
            return memory
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)

    def _copied(self, part: Part) -> Part:
        tensors = {
            suffix: {name: self._memory[suffix, name] for name in named} for suffix, named in part.tensors.items()
        }
        return Part(part.names, tensors, part.values, part.tied, part.groups)


def parts_of(snapshot: Snapshot) -> dict[int, Part]:
    """Take a snapshot apart.

    Raises:
        CheckpointError: something in it cannot be saved; names it.
    """
    parts = {stage: Part() for stage in snapshot.layout.stages or ([0] if snapshot.model else [])}
    stage_of = {name: stage for stage, names in snapshot.layout.stages.items() for name in names}
    tied = _tied(snapshot)
    for name, value in snapshot.model.items():
        part = parts[stage_of.get(name, min(parts))]
        part.names.append(name)
        if name in tied:
            part.tied[name] = tied[name]
        else:
            _put(part, MODEL_SHARD, name, value)
    for name, slots in snapshot.optimizer.items():
        for slot, value in slots.items():
            _put(parts[stage_of.get(name, min(parts))], OPTIMIZER_SHARD, f"{slot}.{name}", value)
    for group in snapshot.groups:
        options = encode(group["options"], "an option of the optimizer")
        for stage, part in parts.items():
            if names := [name for name in group["names"] if stage_of.get(name, min(parts)) == stage]:
                part.groups.append({"names": names, "options": options})
    return parts


def head_of(snapshot: Snapshot) -> tuple[Manifest, dict[str, Any]]:
    """Return a manifest without contents, and what ``training.json`` holds, as JSON.

    Raises:
        CheckpointError: something in it cannot be saved; names it.
    """
    training = {"step_index": snapshot.step_index} | snapshot.training
    training = {key: encode(value, f"{key!r} of the training state") for key, value in training.items()}
    configuration = training.pop(CONFIGURATION, {})
    layout = {name: getattr(snapshot.layout, name) for name in ("num_stages", "num_ranks", "schedule")}
    return Manifest(snapshot.step_index, layout, configuration, Contents()), training


def _put(part: Part, suffix: str, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        form_of(value, name)
        part.tensors[suffix][name] = value
    else:
        kind = "model" if suffix == MODEL_SHARD else "optimizer"
        part.values[kind][name] = encode(value, f"{name!r} of the {kind}")


def _tied(snapshot: Snapshot) -> dict[str, str]:
    """Return name → first name of the same tensor."""
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in snapshot.model.items():
        if isinstance(tensor, Tensor):
            owner = first.setdefault(identity_of(name, tensor), name)
            tied |= {name: owner} if owner != name else {}
    return tied


def _entries(parts: Mapping[int, Part]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    for part in parts.values():
        for suffix, tensors in part.tensors.items():
            for name, tensor in tensors.items():
                yield (suffix, name), tensor
