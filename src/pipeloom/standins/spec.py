"""What a plan depends on: shapes and types of the inputs, the model's modes, and what the caller has switched on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.containers import opened
from pipeloom.standins.followed import Attributes

_PLAIN = (bool, int, float, complex, str, bytes, slice, range, type(None), torch.dtype, torch.Size)


class Modes:
    """The modes and attributes of a model, which its code may look at.

    Args:
        root: the model.
        is_parent: whether a module of that name is around units; insides of units matter by their modes only.
    """

    def __init__(self, root: nn.Module, is_parent: Callable[[str], bool]) -> None:
        self._modules = list(root.modules())
        parents = {name: each for name, each in root.named_modules() if is_parent(name)}
        self._parents, self._attributes, self._num_changes = list(parents.values()), Attributes(parents), 0

    def now(self) -> Hashable:
        """What they are now; of attributes that are no plain values, how often they were changed."""
        self._num_changes += bool(self._attributes.changed())
        return (
            self._num_changes,
            tuple([each.training for each in self._modules]),
            # Asked anew each time: what other processes have is replaced after the cut, and gives its memory back.
            tuple([w.requires_grad for each in self._modules for w in each._parameters.values() if w is not None]),
            tuple([_plain(each) for each in self._parents]),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
            ),
        )  # fmt: skip


def _plain(module: nn.Module) -> Hashable:
    return tuple([(k, v) for k, v in vars(module).items() if v is None or type(v) in (bool, int, float, str)])


def spec(value: Any) -> Hashable:
    """The form of a value: of its tensors shape and type, of other leaves what they are."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.device, value.requires_grad, type(value))
    container = opened(value)
    if container is not None:
        return (type(value), tuple([(name, spec(child)) for name, child in container.children.items()]))
    try:
        hash(value)
    except TypeError:
        return (type(value), id(value))
    return (type(value), value)


def form(value: Any) -> Any:
    """Of tensors shape and type, of arrays and plain values what they are, of other objects which class they have."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if hasattr(value, "tolist"):  # numpy's
        return (type(value), value.tolist())
    container = opened(value)
    if container is None:
        return type(value)
    return (type(value), [(name, form(child)) for name, child in container.children.items()])
