"""Lists and dicts that a unit is given, and leaves something in for its parent or a later unit (contract 24).

Gemma 3n's layers share keys and values through a dict, causal video decoders keep frames in a list. The code of every
stage has such a container of its own; whoever does not run the unit puts into it what the unit would have.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.batch.trees import Structure, flatten, unflatten
from pipeloom.standins.placeholder import Computing, Placeholder, storage_of

Given = tuple[tuple[Any, ...], dict[str, Any]]


class Filled(NamedTuple):
    """An entry that a unit made, or replaced.

    Args:
        argument: the container's place among the arguments, or its name.
        key: of the entry.
        structure: of what is in it.
        leaves: where its leaves stand among the op's outputs.
    """

    argument: int | str
    key: Any
    structure: Structure
    leaves: range

    def within(self, given: Given) -> Any:
        """The container."""
        return given[0][self.argument] if isinstance(self.argument, int) else given[1][self.argument]

    def put(self, given: Given, outputs: list[Any]) -> None:
        """Put what the unit made into the container."""
        _put(self.within(given), self.key, unflatten([outputs[leaf] for leaf in self.leaves], self.structure))

    def copy(self, real: Given, given: Given) -> None:
        """Put what the unit left in a copy of the container into the container itself."""
        here, there = self.within(given), self.within(real)
        if here is not there:
            _put(here, self.key, there[self.key])

    def leaf(self, given: Given, leaf: int) -> Any:
        """One of the entry's leaves."""
        return flatten(self.within(given)[self.key])[0][leaf - self.leaves.start]


class Changes:
    """What a module does to its arguments instead of returning something, while this is entered.

    Args:
        given: its arguments.
        now: what kernels write into.
    """

    def __init__(self, given: Given, now: Computing) -> None:
        self._given, self._now = given, now
        self._leaves = flatten(given)[0]
        self._outer = self._written = set[int]()

    def __enter__(self) -> Changes:
        self._outer, self._now.written = self._now.written, set()
        return self

    def __exit__(self, *_: object) -> None:
        self._written, self._now.written = self._now.written, self._outer | self._now.written

    def has_any(self) -> bool:
        """Whether it has left a value in a container, or written one into a tensor."""
        known = set(map(id, self._leaves))
        if any(isinstance(leaf, Placeholder) and id(leaf) not in known for leaf in flatten(self._given)[0]):
            return True
        given = [leaf for leaf in self._leaves if isinstance(leaf, Tensor) and not _has_no_memory(leaf)]
        return bool(self._written) and any(storage_of(leaf) in self._written for leaf in given)


def _has_no_memory(tensor: Tensor) -> bool:
    """Within vmap and the like."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


class Containers:
    """The lists and dicts among the arguments of a call, as they are before it."""

    def __init__(self, given: Given) -> None:
        named: list[tuple[int | str, Any]] = [*enumerate(given[0]), *given[1].items()]
        self._held = [(where, each, _entries(each)) for where, each in named if isinstance(each, MutableMapping | list)]

    def new(self) -> Iterator[tuple[int | str, Any, Any]]:
        """Place, container and key of each entry since then."""
        for where, each, before in self._held:
            for key, value in _entries(each).items():
                if key not in before or before[key] is not value:
                    yield where, each, key


def _entries(container: Any) -> dict[Any, Any]:
    return dict(enumerate(container)) if isinstance(container, list) else dict(container)


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, list) and key >= len(container):
        container.append(value)
    else:
        container[key] = value
