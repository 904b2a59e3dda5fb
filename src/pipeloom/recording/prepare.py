"""What a dry run runs on: clones with placeholders for weights, copies of small buffers, and no hooks of the user's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.recording.values import Values
from pipeloom.standins.clone import HOOKS, Clones, is_of_a_library
from pipeloom.standins.placeholder import Placeholder

_SMALL = 1 << 18
"""Elements of a buffer that a dry run copies, so that code may compute with its numbers."""


class Buffer(NamedTuple):
    """A buffer that was copied, and the version of the copy."""

    module: str
    name: str
    copy: Tensor
    version: int


def prepare(clones: Clones, values: Values, device: torch.device, owned: Collection[tuple[str, str]]) -> list[Buffer]:
    """Change the clones; return the buffers that were copied.

    Args:
        clones: of the model.
        values: is told of the weights.
        device: what placeholders report.
        owned: buffers that one stage has, by module and name; placeholders stand for them.
    """
    made: dict[int, Tensor] = {}
    copies: list[Buffer] = []
    for name, clone in clones.of.items():
        for key, parameter in clone._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = Placeholder.like(parameter, device)
                    values.weights[id(made[id(parameter)])] = (name, key)
                clone._parameters[key] = made[id(parameter)]  # type: ignore[assignment]
        for key, buffer in clone._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    is_real = _is_small(buffer) and (name, key) not in owned
                    copy = made[id(buffer)] = buffer.detach().clone() if is_real else Placeholder.like(buffer, device)
                    if is_real:
                        copies.append(Buffer(name, key, copy, version_of(copy)))
                    else:
                        values.weights[id(copy)] = (name, key)
                clone._buffers[key] = made[id(buffer)]
        _without_hooks(clone)
    values.keep(*made.values())
    return copies


def _is_small(buffer: Tensor) -> bool:
    return buffer.device.type != "meta" and buffer.numel() <= _SMALL


def _without_hooks(clone: nn.Module) -> None:
    for hooks in HOOKS:
        found = clone.__dict__[hooks].items()
        clone.__dict__[hooks] = OrderedDict((key, hook) for key, hook in found if is_of_a_library(hook))


def version_of(tensor: Any) -> int:
    """What changes with every write; in inference mode torch counts none."""
    return 0 if not isinstance(tensor, Tensor) or tensor.is_inference() else tensor._version


def is_written(tensor: Any, version: int) -> bool:
    """Whether a real tensor was written into since it had that version."""
    return isinstance(tensor, Tensor) and not isinstance(tensor, Placeholder) and version_of(tensor) != version


def device_of(root: nn.Module) -> torch.device:
    """Where a model is, or will be."""
    devices = dict.fromkeys(each.device for each in root.parameters())
    return next((each for each in devices if each.type != "meta"), torch.device("cpu"))


def written_among(values: Sequence[Any], versions: Sequence[int]) -> tuple[int, ...]:
    """Which of some values were written into since they had these versions, by their places."""
    both = enumerate(zip(values, versions, strict=True))
    return tuple([place for place, (value, version) in both if is_written(value, version)])
