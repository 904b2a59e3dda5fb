"""The tensors among a function's arguments, which are plain containers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_OWN = frozenset([Tensor, nn.Parameter])


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for each in value if isinstance(value, tuple | list) else ():
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, tuple | list):
            found.extend(tensors_of(each))
    return found


def exchanged(value: Any, swap: Callable[[Tensor], Tensor]) -> Any:
    """The same value with other tensors in it."""
    if isinstance(value, Tensor):
        return swap(value)
    if isinstance(value, dict):
        return {key: exchanged(each, swap) for key, each in value.items()}
    if not isinstance(value, tuple | list):
        return value
    new = [exchanged(each, swap) for each in value]
    return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)


def is_foreign(types: tuple[type, ...]) -> bool:
    """Whether tensors of other types are among the arguments: they have ways of their own."""
    return not _OWN.issuperset(types)


def is_transformed() -> bool:
    """Whether torch.func (vmap, grad) or forward-mode differentiation runs the code: they see through no node."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch.autograd.forward_ad._current_level >= 0
