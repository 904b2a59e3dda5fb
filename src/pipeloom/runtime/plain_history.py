"""What a stage's modules kept in attributes and generators of their own when a forward read them.

Buffers have their history (`buffer_history`); this is the same for a counter, ``self.num_calls += 1``, for a tensor
without a graph that the next call finds (``self.memory = x.detach()``), for lists, tuples, dicts, sets and deques, and
for a ``random.Random`` or numpy generator that a module draws from: a recompute finds them as its forward did, and
leaves them as they were. So it does what lies in containers, however deep; but of each attribute no more than
`LOOKED_INTO` entries are looked into, outer ones first: what lies in a container beyond that is not put back, and a
tensor there not watched. The container itself is put back whatever its length.

Not put back: an object of another class, a numpy array, a tensor with a graph.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from numbers import Number
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.batch.contents import CONTAINERS, FILLED, copy_of, entries, fill
from pipeloom.batch.stands_for import STANDS_FOR
from pipeloom.errors import RuntimeStateError
from pipeloom.runtime.buffer_aliases import BufferAliases
from pipeloom.runtime.buffer_history import version

LOOKED_INTO = 1000
"""How many entries of containers are looked into for each attribute."""

_USUAL = frozenset[Any]({bool, int, float, str, type(None)})
_PLAIN: tuple[Any, ...] = (*_USUAL, Number, bytes, Enum, torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}

_NONE: Mapping[int, Tensor] = MappingProxyType({})


class _Content(NamedTuple):
    """Of a container, which stays the same object."""

    container: Any
    items: Any


class _Version(NamedTuple):
    """Of a tensor, which is put back by name; its numbers aren't. A fixed one lies where no other can be put."""

    tensor: Tensor
    version: int
    attribute: str
    is_fixed: bool


class _Drawn(NamedTuple):
    """Of a generator, which stays the same object."""

    generator: Any
    state: Any


class State(NamedTuple):
    """What the attributes of a stage's modules were, and what had been reached through them."""

    attributes: list[dict[str, Any]]
    contents: list[_Content]
    versions: list[_Version]
    drawn: list[_Drawn]
    aliases: BufferAliases


class PlainHistory:
    """The plain attributes of one stage; modules of torch itself have none that a forward changes.

    Args:
        module: the stage's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        found = [vars(each).get(STANDS_FOR, each) for each in module.modules()]
        self._kept = [vars(each) for each in found if not type(each).__module__.startswith("torch.nn.")]

    def now(self) -> State:
        """What they are."""
        state, seen = State([], [], [], [], BufferAliases(self._module)), set[int]()
        for kept in self._kept:
            attributes = {key: value for key, value in kept.items() if key not in _OF_TORCH and _has_state(value)}
            state.attributes.append(attributes)
            for key, value in attributes.items():
                if type(value) not in _USUAL:
                    _note(key, value, state, seen)
        return state

    @contextmanager
    def as_they_were(self, then: State) -> Iterator[None]:
        """Put this around a forward that has to find them as another one did, and to leave no trace.

        Raises:
            RuntimeStateError: one is a tensor that was written in place since then.
        """
        now, replaced = self.now(), _replaced(then)
        self._put(then, replaced)
        try:
            yield
        finally:
            self._put(now)

    def _put(self, state: State, replaced: Mapping[int, Tensor] = _NONE) -> None:
        for kept, values in zip(self._kept, state.attributes, strict=True):
            for key in [k for k, v in kept.items() if k not in values and k not in _OF_TORCH and _has_state(v)]:
                del kept[key]
            kept.update(values)
            if replaced:
                kept.update({key: replaced[id(value)] for key, value in values.items() if id(value) in replaced})
        for container, items in state.contents:
            fill(container, items, replaced)
        for generator, drawn in state.drawn:
            _set_state(generator, drawn)


def _replaced(then: State) -> dict[int, Tensor]:
    """What takes the place of tensors that were written since, by their ``id``: parts of what buffers held then."""
    replaced = {}
    for tensor, old_version, attribute, is_fixed in then.versions:
        if version(tensor) == old_version:
            continue
        present = None if is_fixed else then.aliases.present(tensor)
        if present is None:
            raise RuntimeStateError(
                f"a module keeps a tensor in its attribute {attribute!r}, and its forward writes into it in place; it "
                "runs again to recompute, and would find what later micro-batches have written",
                "it lies in the memory of a buffer: read the buffer by its name in the forward"
                if then.aliases.is_buffer(tensor)
                else f"register it, self.register_buffer({attribute!r}, ..., persistent=False), or assign a new tensor "
                "each time",
            )
        replaced[id(tensor)] = present
    return replaced


def _has_state(value: Any) -> bool:
    if type(value) in _USUAL:
        return True
    if isinstance(value, Tensor):
        return not value.requires_grad  # else it has a graph: of this call, or else backward through it would fail
    if isinstance(value, (tuple, frozenset)):  # as it can't be filled with others, its entries are what was assigned
        return len(value) > LOOKED_INTO or all(map(_may_stay, value))
    return isinstance(value, _PLAIN + FILLED) or _is_generator(value)


def _may_stay(entry: Any) -> bool:
    return not (isinstance(entry, Tensor) and entry.requires_grad)


def _is_generator(value: Any) -> bool:
    return isinstance(value, random.Random) or hasattr(value, "bit_generator") or _is_legacy(value)


def _is_legacy(value: Any) -> bool:
    """numpy's older ``RandomState``."""
    return type(value).__module__ == "numpy.random.mtrand" and hasattr(value, "set_state")


def _note(attribute: str, value: Any, state: State, seen: set[int]) -> None:
    """Add what is reached from an attribute's value, outer ones first; ``seen`` is what was reached before."""
    waiting, left = deque([(value, False)]), LOOKED_INTO
    while waiting:
        each, is_fixed = waiting.popleft()
        if isinstance(each, Tensor):
            if (id(each) not in seen or is_fixed) and not each.requires_grad and not state.aliases.is_weight(each):
                state.versions.append(_Version(each, version(each), attribute, is_fixed))
        elif id(each) in seen:
            continue
        elif isinstance(each, CONTAINERS):
            if isinstance(each, FILLED):
                state.contents.append(_Content(each, copy_of(each)))
            if len(each) <= left:
                left -= len(each)
                is_fixed = not isinstance(each, (list, deque, dict))
                waiting.extend((entry, is_fixed) for entry in entries(each) if type(entry) not in _USUAL)
        elif _is_generator(each):
            state.drawn.append(_Drawn(each, _drawn(each)))
        seen.add(id(each))


def _drawn(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if _is_legacy(generator) else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif _is_legacy(generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
