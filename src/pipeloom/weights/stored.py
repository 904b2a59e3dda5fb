"""Weights as they lie in files: what there is, and one tensor at a time.

A memory map looks like the cheap way, but each page that was read stays in the process beside the copy that the model
needs, and a tensor that is a view of it keeps the whole file mapped: at its peak a rank has its stage twice. Here a
tensor's bytes are read into the memory that it will live in, and no file is open in between.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, Protocol

import torch
from torch import Tensor

from pipeloom.archive.durable import read_json
from pipeloom.archive.shard import Form, read_header
from pipeloom.errors import CheckpointError, near

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_BESIDE_BYTES: Final = 1 << 22


class Source(Protocol):
    """Named tensors that can be looked at before they are read: `Weights`, or a view of it."""

    path: Path
    forms: Mapping[str, Form]

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return one on the CPU; in ``dtype``, by default as it is stored."""
        ...


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's bytes are."""

    path: Path
    start: int
    form: Form


class Weights:
    """Tensors in the format of safetensors, as Hugging Face lays them out; making it reads headers only.

    One thread at a time may read.

    Args:
        path: a ``.safetensors`` file, an index (``….index.json``), or a folder with ``model.safetensors``, with
            ``model.safetensors.index.json`` or with a single ``.safetensors`` file.

    Attributes:
        path: as given.
        forms: dtype and shape of each tensor, by name.

    Raises:
        CheckpointError: there is nothing of that kind, a file of the index is missing, lies outside its folder or is
            damaged, or a name occurs twice; says which.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._places: dict[str, _Place] = {}
        # One for all: memory that comes and goes between tensors that stay leaves holes which the allocator keeps.
        self._beside = torch.empty(_BESIDE_BYTES, dtype=torch.uint8)
        shards, expected = _shards(self.path)
        for shard in shards:
            self._add(shard)
        for name, shard in expected.items():
            if name not in self._places or self._places[name].path != shard:
                raise CheckpointError(f"{self.path}: the index says that {name!r} is in {shard}; it is not")
        self.forms: Mapping[str, Form] = {name: place.form for name, place in self._places.items()}

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor on the CPU, in memory of its own; in ``dtype``, by default as it is stored.

        Raises:
            CheckpointError: there is none of that name, or the file has changed or ends too early.
        """
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}", near(name, self._places))
        stored = dtype_of(place.form)
        values = torch.empty(place.form.shape, dtype=stored if dtype is None else dtype)
        try:
            with place.path.open("rb") as file:
                file.seek(place.start)
                is_whole = _read_into(file, values, stored, self._beside)
        except OSError as error:
            raise CheckpointError(f"cannot read {place.path}: {error.strerror}") from None
        if not is_whole:
            raise CheckpointError(f"{place.path} ends within {name!r}: it was cut since it was opened")
        return values

    def _add(self, path: Path) -> None:
        header = read_header(path)
        # The tensors fill the end of the file without a gap, in this order: `read_header` has made sure.
        start = path.stat().st_size - sum(form.num_bytes for form in header.forms.values())
        for name, form in header.forms.items():
            if name in self._places:
                raise CheckpointError(
                    f"tensor {name!r} is in two files, {self._places[name].path} and {path}",
                    "remove the one that does not belong to these weights",
                )
            self._places[name] = _Place(path, start, form)
            start += form.num_bytes


def dtype_of(form: Form) -> torch.dtype:
    """Return torch's dtype of a stored tensor."""
    dtype: torch.dtype = getattr(torch, form.dtype)
    return dtype


def _read_into(file: BinaryIO, values: Tensor, stored: torch.dtype, beside: Tensor) -> bool:
    """Fill a tensor with what the file has next, by way of ``beside`` if its dtype is another; False where it ends."""
    flat = values.view(-1)
    if values.dtype == stored:
        return _fills(file, flat)
    converted = beside.view(stored)
    for start in range(0, len(flat), len(converted)):
        part = flat[start : start + len(converted)]
        if not _fills(file, converted[: len(part)]):
            return False
        part.copy_(converted[: len(part)])
    return True


def _fills(file: BinaryIO, target: Tensor) -> bool:
    octets = target.view(torch.uint8).numpy().data
    return bool(file.readinto(octets) == len(octets))  # type: ignore[attr-defined]


def _shards(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the files of weights, and in which of them an index says that each name is."""
    if path.is_file():
        return _indexed(path) if path.suffix == ".json" else ([path], {})
    if not path.is_dir():
        raise CheckpointError(
            f"weights={str(path)!r} does not exist",
            f"give a .safetensors file, or a folder with {SINGLE} or {INDEX}; of a model on the Hugging Face Hub, what "
            "huggingface_hub.snapshot_download(name) returns is such a folder",
        )
    if (path / SINGLE).exists():
        return [path / SINGLE], {}
    if (path / INDEX).exists():
        return _indexed(path / INDEX)
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        what = f"{len(found)} .safetensors files without an index" if found else "no .safetensors file"
        raise CheckpointError(
            f"the folder {path} has {what}; {SINGLE} or {INDEX} is needed",
            "name the file or the index; weights in other formats are converted by save_pretrained",
        )
    return found, {}


def _indexed(path: Path) -> tuple[list[Path], dict[str, Path]]:
    _, content = read_json(path)
    weight_map = json.loads(content, object_pairs_hook=lambda pairs: _once(pairs, path)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path} is no index of weights: it has no 'weight_map' from names to files")
    files = sorted(set(weight_map.values()))
    for file in files:
        relative = PurePosixPath(file)
        if relative.is_absolute() or ".." in relative.parts or "\\" in file:
            raise CheckpointError(f"{path} names a file outside its folder: {file!r}", "such an index is not followed")
        if not (path.parent / file).is_file():
            raise CheckpointError(f"{path} names {file!r}, which is missing", "get the missing file")
    return [path.parent / file for file in files], {name: path.parent / file for name, file in weight_map.items()}


def _once(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise CheckpointError(f"{path} has the name {name!r} twice")
        fields[name] = value
    return fields
