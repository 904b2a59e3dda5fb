"""All that a run needs to go on, as one value that is saved and loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from pipeloom.checkpoint.folder import OTHER_HINT, new_folder, read_json, verify_folder, write_json
from pipeloom.checkpoint.optimizer import OptimizerState
from pipeloom.checkpoint.tensors import load_tensors, save_tensors
from pipeloom.errors import CheckpointError

_MODEL: Final = "model.safetensors"
_OPTIMIZER: Final = "optimizer.safetensors"
_TRAINING: Final = "training.json"


@dataclass(frozen=True)
class Snapshot:
    """The state between two steps.

    Attributes:
        step_index: completed steps.
        model: parameters and buffers under the whole model's names, whatever the cut.
        optimizer: parameter name → slot → tensor.
        training: what else must go on, as JSON values: seed, position in the text, configuration.
    """

    step_index: int
    model: dict[str, Tensor]
    optimizer: OptimizerState
    training: dict[str, Any]


def save_snapshot(folder: Path, snapshot: Snapshot) -> None:
    """Write a snapshot as a new folder of safetensors and JSON, which appears whole or not at all.

    Raises:
        CheckpointError: the folder exists, or cannot be written.
    """
    slots = {f"{slot}.{name}": t for name, state in snapshot.optimizer.items() for slot, t in state.items()}
    with new_folder(folder) as temporary:
        save_tensors(temporary / _MODEL, snapshot.model)
        save_tensors(temporary / _OPTIMIZER, slots)
        write_json(temporary / _TRAINING, {"step_index": snapshot.step_index} | snapshot.training)


def load_snapshot(folder: Path) -> Snapshot:
    """Verify and read a snapshot; nothing in it is executed.

    Raises:
        CheckpointError: a file is missing, truncated or altered; names it.
    """
    verify_folder(folder)
    training = read_json(folder / _TRAINING)
    optimizer: OptimizerState = {}
    for key, tensor in load_tensors(folder / _OPTIMIZER).items():
        slot, _, name = key.partition(".")
        optimizer.setdefault(name, {})[slot] = tensor
    try:
        step_index = int(training.pop("step_index"))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{folder / _TRAINING} has no step_index", OTHER_HINT) from None
    return Snapshot(step_index, load_tensors(folder / _MODEL), optimizer, training)
