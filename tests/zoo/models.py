"""Thirty real architectures, small and without weights: built, fed, and given a loss.

Each row of ``models.csv`` has a constructor and the inputs of one micro-batch as Python expressions, so that a model
is a line that anybody can check against its library's documentation. ``more.csv`` has relatives of theirs.
"""

from __future__ import annotations

import csv
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.torchvision_shim import load_torchvision

ALIASES = {"transformers": "T", "diffusers": "D", "segmentation_models_pytorch": "smp"}
YOLO_CLASSES = (
    "ClassificationModel",
    "DetectionModel",
    "OBBModel",
    "PoseModel",
    "RTDETRDetectionModel",
    "SegmentationModel",
)
# With one of these among its inputs, a model of transformers computes its own loss.
LOSS_INPUTS = {"labels", "return_loss", "future_values"}
NUM_MICROBATCHES = 4

# Before anything imports transformers, which looks for it.
load_torchvision()

LossFn = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Row:
    """One model: what its expressions need, and the expressions."""

    name: str
    package: str
    constructor: str
    inputs: str


def _read(name: str) -> dict[str, Row]:
    with Path(__file__).with_name(name).open(newline="") as file:
        return {
            row["name"]: Row(row["name"], row["package"], row["constructor"], row["inputs"])
            for row in csv.DictReader(file)
        }


_THIRTY, _MORE = _read("models.csv"), _read("more.csv")
ROWS = _THIRTY | _MORE
NAMES, MORE_NAMES = tuple(_THIRTY), tuple(_MORE)


@cache
def _scope(package: str) -> dict[str, Any]:
    """What the expressions of a package's models may use.

    Raises:
        ImportError: the package is not installed.
    """
    if package == "ultralytics":
        # It writes settings where it is told to, asks its server for news, and prints.
        os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp())
        os.environ.update(YOLO_OFFLINE="true", YOLO_VERBOSE="false")
        tasks = importlib.import_module("ultralytics.nn.tasks")
        return {"torch": torch} | {name: getattr(tasks, name) for name in YOLO_CLASSES}
    return {"torch": torch, ALIASES.get(package, package): importlib.import_module(package)}


def _evaluated(row: Row, expression: str, seed: int) -> Any:
    """The value of one of the file's expressions, the same for the same seed."""
    scope = _scope(row.package)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return eval(expression, dict(scope))


def build(name: str, seed: int = 0) -> nn.Module:
    """The model in float32 and in training mode, with the weights of ``seed``."""
    model: nn.Module = _evaluated(ROWS[name], ROWS[name].constructor, seed)
    return model.train()


def microbatches(name: str, num_microbatches: int = NUM_MICROBATCHES, seed: int = 1) -> list[dict[str, Any]]:
    """The inputs of each micro-batch, keyword arguments of the model."""
    return [_evaluated(ROWS[name], ROWS[name].inputs, seed + each) for each in range(num_microbatches)]


def batch(name: str, num_microbatches: int = NUM_MICROBATCHES, seed: int = 1) -> dict[str, Any]:
    """The inputs of a whole batch: tensors ``(num_microbatches × rows, ...)``; what is no tensor as it is."""
    parts = microbatches(name, num_microbatches, seed)
    return {key: _joined([part[key] for part in parts]) for key in parts[0]}


def _joined(values: list[Any]) -> Any:
    return torch.cat(values) if isinstance(values[0], Tensor) else values[0]


def loss_of(name: str) -> LossFn | None:
    """The ``loss_fn`` of a pipeline: None where the model's output has its own loss, else `mean_squares`."""
    return None if LOSS_INPUTS & microbatches(name, 1)[0].keys() else mean_squares


def loss_in(output: Any) -> Tensor:
    """The same for a plain loop: the output's own loss, or `mean_squares` of it; a scalar."""
    own = getattr(output, "loss", None)
    return mean_squares(output) if own is None else own


def mean_squares(output: Any) -> Tensor:
    """The sum over all floating-point tensors of an output of their mean squares: a scalar that every output moves."""
    squares = [leaf.square().mean() for leaf in tensors(output) if leaf.is_floating_point()]
    return torch.stack(squares).sum()


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts, sequences, dataclasses and outputs of transformers and diffusers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)
    elif is_dataclass(value):
        yield from tensors([getattr(value, field.name) for field in fields(value)])
