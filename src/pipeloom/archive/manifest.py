"""The table of contents of a checkpoint, written last: no file counts that it does not vouch for.

A manifest without a checksum of its own is the one file in which a flipped bit goes unnoticed: another rate, another
step, another layout. So its last entry is the SHA-256 of itself, with zeros in that entry's place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from pipeloom.archive.durable import json_bytes, read_json
from pipeloom.archive.shard import DTYPES, Form
from pipeloom.errors import CheckpointError

MANIFEST: Final = "manifest.json"
TRAINING: Final = "training.json"
MODEL_SHARD: Final = ".safetensors"
OPTIMIZER_SHARD: Final = ".optimizer.safetensors"
FORMAT: Final = "pipeloom-checkpoint"
FORMAT_VERSION: Final = 2
_LAYOUT: Final[Mapping[str, Callable[[Any], Any]]] = {"num_stages": int, "num_ranks": int, "schedule": str}
_CHECKSUM: Final = "checksum"
_ZEROS: Final = "0" * 64

_T = TypeVar("_T")


@dataclass(frozen=True)
class FileRecord:
    """What a file must be like."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """Where a tensor lies, and its form."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def form(self) -> Form:
        """Its form."""
        return Form(self.dtype, self.shape)


@dataclass(frozen=True)
class Contents:
    """What one stage wrote, or all of them.

    Attributes:
        files: name → what it must be like.
        model: parameters and buffers, under the whole model's names.
        optimizer: ``slot.parameter name`` → where it lies.
        tied: name → the name under which the same tensor was written.
        values: what is saved but no tensor: "model" and "optimizer" → name → JSON.
        groups: hyperparameters: ``{"names": […], "options": {…}}``.
        stages: stage → the names of the model's entries on it, as text.
    """

    files: dict[str, FileRecord] = field(default_factory=dict)
    model: dict[str, TensorRecord] = field(default_factory=dict)
    optimizer: dict[str, TensorRecord] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    stages: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def merged(cls, parts: Iterable[Contents]) -> Contents:
        """Return what all parts hold."""
        whole = cls(values={"model": {}, "optimizer": {}})
        for part in parts:
            for name in ("files", "model", "optimizer", "tied", "stages"):
                getattr(whole, name).update(getattr(part, name))
            for kind, values in part.values.items():
                whole.values[kind].update(values)
            whole.groups.extend(part.groups)
        return whole

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Contents:
        """Return what `asdict` wrote.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it was not that.
        """
        return cls(
            files=_each(value["files"], lambda each: FileRecord(int(each["num_bytes"]), str(each["sha256"]))),
            model=_each(value["model"], _tensor),
            optimizer=_each(value["optimizer"], _tensor),
            tied=_each(value["tied"], str),
            values={kind: dict(value["values"][kind]) for kind in ("model", "optimizer")},
            groups=[
                {"names": [*map(str, each["names"])], "options": dict(each["options"])} for each in value["groups"]
            ],
            stages=_each(value["stages"], lambda names: [*map(str, names)]),
        )

    def tensors_of(self, file: str) -> dict[str, Form]:
        """Return the tensors that lie in a file, by their names in it."""
        records = self.optimizer if file.endswith(OPTIMIZER_SHARD) else self.model
        return {name: record.form for name, record in records.items() if record.file == file}

    def check(self) -> None:
        """Refuse names that lead nowhere.

        Raises:
            ValueError: a file outside the folder, or a tensor without a file.
        """
        for name in self.files:
            if Path(name).name != name or name in ("", "..", MANIFEST):
                raise ValueError(f"it lists a file outside its folder: {name!r}")
        lost = [name for each in (self.model, self.optimizer) for name, r in each.items() if r.file not in self.files]
        lost += [name for name, owner in self.tied.items() if owner not in self.model]
        if lost:
            raise ValueError(f"{lost[0]!r} lies in no file that it lists")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step_index: completed steps.
        layout: ``num_stages``, ``num_ranks`` and ``schedule`` of the run that saved it.
        configuration: of that run; what the user gave, as JSON.
        contents: of all stages.
    """

    step_index: int
    layout: dict[str, Any]
    configuration: dict[str, Any]
    contents: Contents

    def as_bytes(self) -> bytes:
        """Return what is written, checksum included."""
        head = {"format": FORMAT, "version": FORMAT_VERSION, "step_index": self.step_index, "layout": self.layout}
        value = head | {"configuration": self.configuration} | asdict(self.contents)
        return _sealed(json_bytes(value | {_CHECKSUM: _ZEROS}))


def shard_of(stage: int, suffix: str) -> str:
    """Return the name of a stage's file."""
    return f"stage-{stage:03d}{suffix}"


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest by itself; the files that it lists are not looked at.

    Raises:
        CheckpointError: it is missing, damaged, or of another version of the format; names it.
    """
    path = folder / MANIFEST
    value, content = read_json(path)
    is_whole = _is_sealed(content, str(value.get(_CHECKSUM)))
    if (is_whole or _CHECKSUM not in value) and (value.get("format"), value.get("version")) != (FORMAT, FORMAT_VERSION):
        raise _of_another_format(path, value)
    if not is_whole:
        raise CheckpointError(f"{path} is damaged: its content does not have the SHA-256 that it ends with")
    try:
        contents = Contents.from_json(value)
        contents.check()
        layout = {key: kind(value["layout"][key]) for key, kind in _LAYOUT.items()}
        return Manifest(int(value["step_index"]), layout, dict(value["configuration"]), contents)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = str(error) if type(error) is ValueError else repr(error)
        raise CheckpointError(f"{path} is damaged: {what}") from None


def _sealed(content: bytes) -> bytes:
    """Put the checksum of a manifest with zeros in their place; they come last."""
    head, _, tail = content.rpartition(_ZEROS.encode())
    return head + hashlib.sha256(content).hexdigest().encode() + tail


def _is_sealed(content: bytes, digest: str) -> bool:
    blank = content.replace(digest.encode(), _ZEROS.encode())
    return len(digest) == len(_ZEROS) and _sealed(blank) == content


def _of_another_format(path: Path, value: Mapping[str, Any]) -> CheckpointError:
    given = f"{value.get('format')!r} version {value.get('version')!r}"
    message = f"{path} says {given}; {FORMAT!r} version {FORMAT_VERSION} is needed"
    if value.get("format") == FORMAT and value.get("version") == 1:
        return CheckpointError(message, "no release wrote version 1: end that run with the sources that began it")
    return CheckpointError(message)


def _tensor(value: Mapping[str, Any]) -> TensorRecord:
    dtype = str(value["dtype"])
    if dtype not in DTYPES:
        raise ValueError(f"there is no dtype {dtype!r}")
    return TensorRecord(str(value["file"]), dtype, tuple(map(int, value["shape"])))


def _each(table: Mapping[str, Any], convert: Callable[[Any], _T]) -> dict[str, _T]:
    return {name: convert(value) for name, value in table.items()}
