"""What a stage's modules kept in attributes and generators of their own when a forward read them.

Buffers have their history (`buffer_history`); this is the same for a counter, ``self.num_calls += 1``, for a tensor
without a graph that the next call finds (``self.memory = x.detach()``), for lists, dicts and sets of such, and for a
``random.Random`` or numpy generator that a module draws from: a recompute finds them as its forward did, and leaves
them as they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipeloom.batch.stands_for import STANDS_FOR
from pipeloom.errors import RuntimeStateError
from pipeloom.runtime.buffer_history import version

_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}

_CONTAINERS = (list, dict, set)

State = list[dict[str, Any]]


class PlainHistory:
    """The plain attributes of one stage; modules of torch itself have none that a forward changes.

    Args:
        module: the stage's.
    """

    def __init__(self, module: nn.Module) -> None:
        found = [vars(each).get(STANDS_FOR, each) for each in module.modules()]
        self._kept = [vars(each) for each in found if not type(each).__module__.startswith("torch.nn.")]

    def now(self) -> State:
        """What they are."""
        return [
            {key: _state_of(value) for key, value in kept.items() if key not in _OF_TORCH and _has_state(value)}
            for kept in self._kept
        ]

    @contextmanager
    def as_they_were(self, then: State) -> Iterator[None]:
        """Put this around a forward that has to find them as another one did, and to leave no trace."""
        now = self.now()
        self._put(then)
        try:
            yield
        finally:
            self._put(now)

    def _put(self, state: State) -> None:
        for kept, values in zip(self._kept, state, strict=True):
            for key in [key for key, value in kept.items() if key not in (*values, *_OF_TORCH) and _has_state(value)]:
                del kept[key]
            for key, value in values.items():
                kept[key] = _back(key, value)


def _has_state(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.requires_grad  # else it has a graph: of this call, or else backward through it would fail
    return (
        isinstance(value, (*_PLAIN, *_CONTAINERS, random.Random))
        or hasattr(value, "bit_generator")
        or _is_legacy(value)
    )


def _is_legacy(value: Any) -> bool:
    """numpy's older ``RandomState``."""
    return type(value).__module__ == "numpy.random.mtrand" and hasattr(value, "set_state")


class _Content(NamedTuple):
    """Of a container, which stays the same object."""

    container: Any
    items: Any


class _Version(NamedTuple):
    """Of a tensor, which is put back by name; its numbers aren't."""

    tensor: Tensor
    version: int


class _Drawn(NamedTuple):
    """Of a generator, which stays the same object."""

    generator: Any
    state: Any


def _state_of(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return _Version(value, version(value))
    if isinstance(value, _CONTAINERS):
        return _Content(value, value.copy())
    if isinstance(value, random.Random):
        return _Drawn(value, value.getstate())
    return _Drawn(value, value.get_state() if _is_legacy(value) else value.bit_generator.state)


def _back(key: str, state: Any) -> Any:
    """What an attribute was."""
    if isinstance(state, _Version):
        if version(state.tensor) != state.version:
            raise RuntimeStateError(
                f"a module keeps a tensor in its attribute {key!r}, and its forward writes into it in place; it runs "
                "again to recompute, and would find what later micro-batches have written",
                f"register it, self.register_buffer({key!r}, ..., persistent=False), or assign a new tensor each time",
            )
        return state.tensor
    if isinstance(state, _Content):
        _fill(state.container, state.items)
        return state.container
    if isinstance(state, _Drawn):
        _set_state(state.generator, state.state)
        return state.generator
    return state


def _fill(container: Any, items: Any) -> None:
    now, then = _parts(container), _parts(items)
    if len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True)):
        return  # another stage may hold it too, as long as nothing changes
    container.clear()
    if isinstance(container, list):
        container.extend(items)
    else:
        container.update(items)


def _parts(container: Any) -> list[Any]:
    return [each for pair in container.items() for each in pair] if isinstance(container, dict) else list(container)


def _set_state(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif _is_legacy(value):
        value.set_state(state)
    else:
        value.bit_generator.state = state
