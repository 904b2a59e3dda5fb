"""All that a run needs to go on, as one value that is saved and loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

from pipeloom.archive.durable import read_json
from pipeloom.archive.group import ALONE, Group
from pipeloom.archive.manifest import TRAINING, Contents, Manifest, TensorRecord
from pipeloom.archive.verify import offer_beside, verify_folder
from pipeloom.checkpoint.optimizer import OptimizerState
from pipeloom.checkpoint.tensors import read_tensors
from pipeloom.checkpoint.values import decode
from pipeloom.errors import CheckpointError

CONFIGURATION: Final = "config"


@dataclass(frozen=True)
class Layout:
    """How the run is cut, as far as this process holds it.

    Attributes:
        num_stages: of the whole model.
        num_ranks: that run them.
        schedule: its name.
        stages: stage → the names of its entries in the model's state. Names that no stage has go to the first.
    """

    num_stages: int = 1
    num_ranks: int = 1
    schedule: str = ""
    stages: Mapping[int, Sequence[str]] = field(default_factory=lambda: {0: ()})

    @classmethod
    def of(cls, pipe: Any) -> Layout:
        """Return what ``pipe.layout`` says; without one, all is one stage."""
        known = {name: value for name, value in getattr(pipe, "layout", {}).items() if name in cls.__annotations__}
        return cls(**known)


@dataclass(frozen=True)
class Snapshot:
    """The state between two steps, or this process's part of it.

    Attributes:
        step_index: completed steps.
        model: parameters and buffers under the whole model's names, whatever the cut.
        optimizer: parameter name → slot → tensor or number.
        training: what else must go on, as values that JSON can hold: seed, position in the text; the key "config" is
            the run's configuration.
        groups: the optimizer's hyperparameters: ``{"names": […], "options": {…}}``.
        layout: what is written into which file.
    """

    step_index: int
    model: dict[str, Any]
    optimizer: OptimizerState
    training: dict[str, Any]
    groups: Sequence[Mapping[str, Any]] = ()
    layout: Layout = Layout()


def load_snapshot(folder: Path, names: Collection[str] | None = None, group: Group = ALONE) -> Snapshot:
    """Verify a checkpoint and read it; nothing in it is executed.

    Args:
        folder: the checkpoint's.
        names: the model's entries to read, and the optimizer's state of those; None: all.
        group: ranks that load it together; each verifies a share of the files.

    Raises:
        CheckpointError: a file is missing, truncated or altered; names it, and the newest good checkpoint beside it.
    """
    return read_snapshot(folder, verified(folder, group), names)


def verified(folder: Path, group: Group = ALONE) -> Manifest:
    """Verify a checkpoint that the user chose.

    Raises:
        CheckpointError: it is damaged; names the file, and the newest good checkpoint beside it.
    """
    try:
        return verify_folder(folder, group)
    except CheckpointError as error:
        raise CheckpointError(error.message, error.hint or offer_beside(folder)) from None


def read_snapshot(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> Snapshot:
    """Read a checkpoint that was verified.

    Args:
        folder: the checkpoint's.
        manifest: what the verification returned.
        names: as for `load_snapshot`.

    Raises:
        CheckpointError: it is well written, but not by Pipeloom.
    """
    contents = manifest.contents
    wanted = _all_names(contents) if names is None else {*names}
    try:
        training = decode(read_json(folder / TRAINING)[0])
        training |= {CONFIGURATION: decode(manifest.configuration)} if manifest.configuration else {}
        return Snapshot(
            step_index=int(training.pop("step_index")),
            model=_model(folder, contents, wanted),
            optimizer=_optimizer(folder, contents, wanted),
            training=training,
            groups=[{"names": each["names"], "options": decode(each["options"])} for each in contents.groups],
            layout=_layout(manifest),
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder} holds values that Pipeloom does not write: {error!r}") from None


def _all_names(contents: Contents) -> set[str]:
    slots = chain(contents.optimizer, contents.values["optimizer"])
    return {*contents.model, *contents.tied, *contents.values["model"], *map(_parameter, slots)}


def _model(folder: Path, contents: Contents, wanted: Collection[str]) -> dict[str, Any]:
    owners = {contents.tied.get(name, name) for name in wanted}
    model = _read(folder, {name: record for name, record in contents.model.items() if name in owners})
    model |= {name: decode(value) for name, value in contents.values["model"].items()}
    model |= {name: model[owner] for name, owner in contents.tied.items() if name in wanted}
    return {name: value for name, value in model.items() if name in wanted}


def _optimizer(folder: Path, contents: Contents, wanted: Collection[str]) -> OptimizerState:
    slots = _read(folder, {key: record for key, record in contents.optimizer.items() if _parameter(key) in wanted})
    slots |= {key: decode(value) for key, value in contents.values["optimizer"].items() if _parameter(key) in wanted}
    state: OptimizerState = {}
    for key, value in slots.items():
        state.setdefault(_parameter(key), {})[key.partition(".")[0]] = value
    return state


def _read(folder: Path, records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Read tensors file by file."""
    by_file: dict[str, list[str]] = {}
    for name, record in records.items():
        by_file.setdefault(record.file, []).append(name)
    return {name: each for file, names in by_file.items() for name, each in read_tensors(folder / file, names).items()}


def _parameter(key: str) -> str:
    return key.partition(".")[2]


def _layout(manifest: Manifest) -> Layout:
    return Layout(**manifest.layout, stages={int(stage): each for stage, each in manifest.contents.stages.items()})
