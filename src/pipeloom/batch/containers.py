"""Containers of tensors, opened one level at a time and built again.

torch's pytree takes whatever is not registered for one opaque value: a plain dataclass, a `UserDict` (transformers'
``BatchEncoding``) or a subclass of ``dict``, ``list`` or ``tuple`` would keep its tensors whole, in silence. Here they
are opened too. What is registered is opened as it was registered.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

# Private, and still the only registry that third parties (transformers, tensordict) enter their containers in.
# Three of its functions are used, here and nowhere else; they are the same in torch 2.9 and 2.13.
from torch.utils import _pytree as pytree

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_WHOLE = (torch.Tensor, torch.Size)
"""A Size is registered, but comes back as a bare tuple."""
_BUILTINS = frozenset({tuple, list, dict})


@dataclass(frozen=True)
class Container:
    """One level of a container.

    Args:
        children: what it holds, by the text that leads there, as ``['mask']``, ``[0]`` or ``.logits``.
        made_of: makes a container of the same type from other children in the same order.
        static: what besides the children must be equal for two containers to be alike.
    """

    children: dict[str, Any]
    made_of: Callable[[list[Any]], Any]
    static: Any = None


def opened(value: Any) -> Container | None:
    """Open ``value`` by one level; None if it is a leaf."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, _WHOLE):
        return None
    if kind in _BUILTINS:
        return _builtin(value)
    for rule in (_registered, _dataclass, _mapping, _sequence):
        found = rule(value)
        if found is not None:
            return found
    return None


def rebuilt(value: Any, container: Container, children: list[Any]) -> Any:
    """``value`` with other children; itself if none changed, so what holds no tensor is never rebuilt."""
    old = container.children.values()
    is_same = all(new is was for new, was in zip(children, old, strict=True))
    return value if is_same else container.made_of(children)


def leaves(path: str, value: Any, atoms: type | tuple[type, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The leaves of ``value`` in order, each with the text that leads there from ``path``.

    Args:
        path: how ``value`` itself is called, as ``args``.
        value: a leaf, or containers of leaves.
        atoms: types that are leaves here though they could be opened.
    """
    container = None if isinstance(value, atoms) else opened(value)
    if container is None:
        yield path, value
        return
    for name, child in container.children.items():
        yield from leaves(path + name, child, atoms)


def _builtin(value: Any) -> Container:
    """Every boundary of every micro-batch comes here: pytree takes ten times as long for the same."""
    if type(value) is dict:
        keys = tuple(value)
        return Container({f"[{key!r}]": value[key] for key in keys}, lambda new: dict(zip(keys, new, strict=True)))
    return Container({f"[{index}]": child for index, child in enumerate(value)}, type(value))


def _registered(value: Any) -> Container | None:
    children, spec = pytree.tree_flatten(value, is_leaf=lambda inner: inner is not value)
    if len(children) == 1 and children[0] is value:
        return None
    static = None if isinstance(value, Mapping) else spec.context
    return Container(
        children=dict(zip(_names(value, len(children)), children, strict=True)),
        made_of=lambda new: pytree.tree_unflatten(new, spec),
        static=static,
    )


def _names(value: Any, count: int) -> list[str]:
    try:
        paths = pytree.tree_flatten_with_path(value, is_leaf=lambda inner: inner is not value)[0]
    except ValueError:  # registered without names
        return [f"[{index}]" for index in range(count)]
    return [str(key) for (key,), _ in paths]


def _dataclass(value: Any) -> Container | None:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    names = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]

    def made_of(new: list[Any]) -> Any:
        # Neither __init__ nor __post_init__ runs again: what they would do has been done to the whole batch.
        made = copy.copy(value)
        for name, child in zip(names, new, strict=True):
            object.__setattr__(made, name, child)
        return made

    return Container({f".{name}": getattr(value, name) for name in names}, made_of)


def _mapping(value: Any) -> Container | None:
    if not isinstance(value, MutableMapping):
        return None
    keys = list(value)

    def made_of(new: list[Any]) -> Any:
        made = copy.copy(value)
        for key, child in zip(keys, new, strict=True):
            made[key] = child
        return made

    return Container({f"[{key!r}]": value[key] for key in keys}, made_of)


def _sequence(value: Any) -> Container | None:
    if not isinstance(value, list | tuple) or not _is_ours_to_make(value):
        return None

    def made_of(new: list[Any]) -> Any:
        made = copy.copy(value) if isinstance(value, list) else tuple.__new__(type(value), new)
        if isinstance(made, list):
            made[:] = new
        elif hasattr(value, "__dict__"):
            vars(made).update(vars(value))
        return made

    return Container({f"[{index}]": child for index, child in enumerate(value)}, made_of)


def _is_ours_to_make(value: list[Any] | tuple[Any, ...]) -> bool:
    """False for the tuples of C, as `time.struct_time`, which are values and hold no tensors."""
    if isinstance(value, tuple):
        try:
            tuple.__new__(type(value), value)
        except TypeError:
            return False
    return True
