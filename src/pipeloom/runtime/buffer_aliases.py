"""Attributes that are a buffer of the stage under another name, or lie in its memory: `self.alias = self.count[1:]`.

A recompute reads and writes a buffer as a copy of what it held when the forward began (`batch_norm.frozen_buffers`).
What lies in the buffer's memory has to be a part of that copy meanwhile: as it is, it would read what later
micro-batches have written, and write it once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeloom.runtime.buffer_history import storage


class _Place(NamedTuple):
    """Where a module has a buffer, and the buffer that was there."""

    module: nn.Module
    name: str
    buffer: Tensor

    def now(self) -> Tensor | None:
        """The buffer that is there now."""
        return dict(self.module.named_buffers(recurse=False, remove_duplicate=False)).get(self.name)


class BufferAliases:
    """Of one stage, as they are when this is made.

    Args:
        module: the stage's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: dict[int, list[_Place]] | None = None
        self._weights: frozenset[int] = frozenset()

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether it lies in the memory of a parameter: a forward that writes one runs again on the written one."""
        self._look()
        return _memory(tensor) in self._weights

    def is_buffer(self, tensor: Tensor) -> bool:
        """Whether it lies in the memory of a buffer."""
        return _memory(tensor) in self._look()

    def present(self, tensor: Tensor) -> Tensor | None:
        """What takes its place in the buffer that the module has now; None if nothing can."""
        for place in self._look().get(_memory(tensor), ()):
            now = place.now()
            if tensor is place.buffer or now is place.buffer:
                return now
            if now is not None and _is_inside(tensor, place.buffer) and now.stride() == place.buffer.stride():
                start = now.storage_offset() + tensor.storage_offset() - place.buffer.storage_offset()
                return now.as_strided(tensor.size(), tensor.stride(), start)
        return None

    def _look(self) -> dict[int, list[_Place]]:
        """Not before a module keeps a tensor: few do."""
        if self._places is None:
            self._places = {}
            self._weights = frozenset(_memory(each) for each in self._module.parameters() if not is_lazy(each))
            for module in self._module.modules():
                for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                    if not is_lazy(buffer):
                        self._places.setdefault(_memory(buffer), []).append(_Place(module, name, buffer))
        return self._places


def _memory(tensor: Tensor) -> int:
    own = storage(tensor)
    return id(tensor) if own is None else own


def _is_inside(tensor: Tensor, buffer: Tensor) -> bool:
    """Whether it can be told as a part of the buffer."""
    if storage(tensor) is None or _kind(tensor) != _kind(buffer) or 0 in tensor.shape:
        return False
    start = tensor.storage_offset() - buffer.storage_offset()
    return start >= 0 and start + _reach(tensor) <= _reach(buffer)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _reach(tensor: Tensor) -> int:
    """From its first element to its last."""
    return sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
