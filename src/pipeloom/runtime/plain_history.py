"""What a stage's modules kept in plain attributes and generators of their own when a forward read them.

Buffers have their history (`buffer_history`); this is the same for a counter, ``self.num_calls += 1``, and for a
``random.Random`` or numpy generator that a module draws from: a recompute finds them as its forward did, and leaves
them as they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}

State = list[dict[str, Any]]


class PlainHistory:
    """The plain attributes of one stage; modules of torch itself have none that a forward changes.

    Args:
        module: the stage's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kept = [vars(each) for each in module.modules() if not type(each).__module__.startswith("torch.nn.")]

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
            for key, value in values.items():
                if _has_state(kept.get(key)) and not isinstance(kept.get(key), _PLAIN):
                    _set_state(kept[key], value)
                else:
                    kept[key] = value


def _has_state(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, random.Random)) or hasattr(value, "bit_generator") or _is_legacy(value)


def _is_legacy(value: Any) -> bool:
    """numpy's older ``RandomState``."""
    return type(value).__module__ == "numpy.random.mtrand" and hasattr(value, "set_state")


def _state_of(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, random.Random):
        return value.getstate()
    return value.get_state() if _is_legacy(value) else value.bit_generator.state


def _set_state(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif _is_legacy(value):
        value.set_state(state)
    else:
        value.bit_generator.state = state
