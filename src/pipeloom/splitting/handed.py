"""Hooks that a parent's code puts on modules inside units while it runs (transformers' recording of outputs).

A stage's parents see stand-ins of its units, and hooks land on those. The unit that runs gets them for the time of its
call and loses them after it: the model itself never keeps a hook that only a stage asked for, and one that it has got
in the meantime by a run of its own fires once.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipeloom.standins.clone import HOOK_KINDS

_DEPTH = 4
"""Of functions within closures that are compared."""


class Handed:
    """What stand-ins inside one unit have got."""

    def __init__(self) -> None:
        self._now: dict[tuple[int, str, int], tuple[dict[int, Any], Any]] = {}

    def watch(self, stand_in: nn.Module, real: nn.Module) -> None:
        """Note hooks that will be put on the stand-in, for the module that runs."""
        for kind in HOOK_KINDS:
            here, there = vars(stand_in).get(kind), vars(real).get(kind)
            if here is not None and there is not None:
                stand_in.__dict__[kind] = _Noting(here, there, kind, self._now)

    @property
    def has_any(self) -> bool:
        """Whether there are any."""
        return bool(self._now)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Put this around a call of the unit."""
        put = []
        for (_, _, key), (hooks, hook) in list(self._now.items()):
            if key not in hooks and not any(is_alike(hook, each) for each in hooks.values() if callable(each)):
                hooks[key] = hook
                put.append((hooks, key))
        try:
            yield
        finally:
            for hooks, key in put:
                hooks.pop(key, None)


class _Noting(OrderedDict[int, Any]):
    """The hooks of a stand-in.

    Args:
        hooks: that it has already.
        real: those of the module that runs.
        kind: the attribute that they are.
        now: where new ones are noted.
    """

    def __init__(
        self, hooks: Mapping[int, Any], real: dict[int, Any], kind: str, now: dict[tuple[int, str, int], Any]
    ) -> None:
        self._real: dict[int, Any] | None = None
        super().__init__(hooks)
        self._real, self._kind, self._now = real, kind, now

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook)
        if self._real is not None:
            self._now[id(self._real), self._kind, key] = self._real, hook

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        if self._real is not None:
            self._now.pop((id(self._real), self._kind, key), None)


def is_alike(one: Any, other: Any, depth: int = _DEPTH) -> bool:
    """Whether two functions, made anew by each run of the same code, do the same."""
    if one == other:
        return True
    if not isinstance(one, types.FunctionType) or not isinstance(other, types.FunctionType) or not depth:
        return False
    if one.__code__ is not other.__code__ or one.__defaults__ != other.__defaults__:
        return False
    return all(
        _is_same(a.cell_contents, b.cell_contents, depth - 1)
        for a, b in zip(one.__closure__ or (), other.__closure__ or (), strict=True)
    )


def _is_same(one: Any, other: Any, depth: int) -> bool:
    if isinstance(one, types.FunctionType):
        return is_alike(one, other, depth)
    return one is other or (isinstance(one, int | str | bytes | float) and type(one) is type(other) and one == other)
