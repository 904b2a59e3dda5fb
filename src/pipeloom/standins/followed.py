"""What attributes of modules hold besides plain values, so that clones can follow a model that its user changes.

A mask put in the place of another one, an entry of a dict, an activation, a forward of the user's own: a clone has
references and containers of its own, and would go on with what there was when it was made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_pipeloom_call"})
PLAIN = (bool, int, float, str)
_CONTAINERS = (list, tuple, set, dict, OrderedDict)
_MOST_ITEMS = 10_000
"""Longer containers are tables of numbers, which clones share."""
_NONE = object()

Place = tuple[str, str]
"""A module, and the name of its attribute, parameter or buffer."""


class Attributes:
    """The attributes of modules as they were when last looked at.

    Args:
        modules: by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._seen = {name: _contents(module) for name, module in self._modules.items()}

    def changed(self) -> list[Place]:
        """Those that were set, removed, or have other things inside since the last call."""
        found: list[Place] = []
        for name, module in self._modules.items():
            now, before = _contents(module), self._seen[name]
            if now or before:
                keys = {**before, **now}
                found += [(name, key) for key in keys if not is_same(now.get(key, _NONE), before.get(key, _NONE))]
                self._seen[name] = now
        return found


def _contents(module: nn.Module) -> dict[str, Any]:
    own = vars(module).items()
    return {
        key: content_of(value)
        for key, value in own
        if key not in OF_EVERY_MODULE and value is not None and not isinstance(value, PLAIN)
    }


def content_of(value: Any) -> Any:
    """What a container has inside, copied; anything else is its own content."""
    if type(value) not in _CONTAINERS or len(value) > _MOST_ITEMS:
        return value
    if isinstance(value, dict):
        return {key: content_of(each) for key, each in value.items()}
    return set(value) if isinstance(value, set) else [content_of(each) for each in value]


def is_same(one: Any, other: Any) -> bool:
    """Whether contents are the same objects, or equal plain values."""
    if one is other or type(one) is not type(other):
        return one is other
    if type(one) is dict:
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return isinstance(one, (*PLAIN, set)) and one == other
