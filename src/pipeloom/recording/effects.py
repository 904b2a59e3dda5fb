"""Tensors that leave a unit other than by return (contract 24).

transformers records hidden states and router logits in a list that a context variable holds; other models leave an
auxiliary loss in an attribute, for a parent to add up. Known kinds are found by comparing Python's state around a unit.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from pipeloom.standins.clone import Clones
from pipeloom.standins.placeholder import Placeholder


class Effects:
    """What a unit leaves in context variables and in attributes of its modules."""

    def __init__(self, clones: Clones, name: str) -> None:
        below = f"{name}."
        self._modules = {n: each for n, each in clones.of.items() if n == name or n.startswith(below)}
        self._attributes = {n: dict(vars(each)) for n, each in self._modules.items()}
        self._lengths = {key: len(each) for key, each in _lists().items()}

    def found(self, as_value: Callable[[Any], Any]) -> Iterator[tuple[Any, tuple[Any, ...], Any]]:
        """Target, path and tensor of each effect since this was made; ``as_value`` makes real tensors values."""
        for (variable, path), values in _lists().items():
            for index in range(self._lengths.get((variable, path), 0), len(values)):
                values[index] = as_value(values[index])
                yield variable, path, values[index]
        for name, module in self._modules.items():
            before = self._attributes[name]
            for key, value in vars(module).items():
                if isinstance(value, Placeholder) and before.get(key) is not value:
                    yield name, (key,), value


def _lists() -> dict[tuple[Any, tuple[Any, ...]], list[Any]]:
    """The lists in context variables, and those one level below in dicts."""
    found: dict[tuple[Any, tuple[Any, ...]], list[Any]] = {}
    for variable, value in contextvars.copy_context().items():
        if isinstance(value, list):
            found[variable, ()] = value
        elif isinstance(value, dict):
            found.update({(variable, (key,)): each for key, each in value.items() if isinstance(each, list)})
    return found
