"""Which memory holds no values yet, and why.

Marking a tensor would miss its views; memory is what they share. So the mark is on the storage, under its address, and
a weak reference keeps that address from being given to another one.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class State(enum.Enum):
    """Why a tensor has no values."""

    UNWRITTEN = "uninitialised memory"
    DRAWN = "random numbers, or computed of what has no values"
    PENDING = "one value everywhere, which is not written yet"


@dataclass(frozen=True)
class _Entry:
    storage: StorageWeakRef
    state: State
    dtype: torch.dtype
    shape: tuple[int, ...]
    fill: Any

    @property
    def is_live(self) -> bool:
        return not self.storage.expired()  # type: ignore[no-untyped-call]


class Ledger:
    """States of memory; what is not in it holds values."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def state(self, tensor: Tensor) -> State | None:
        """Return why a tensor has no values, or None where it has."""
        if tensor.is_meta:
            return State.DRAWN
        entry = self._entry(tensor)
        return None if entry is None else entry.state

    def is_unknown(self, tensor: Tensor) -> bool:
        """Whether nobody could say what values a tensor has."""
        return self.state(tensor) in (State.UNWRITTEN, State.DRAWN)

    def note(self, tensor: Tensor, state: State, fill: Any = None) -> None:
        """Remember that a tensor's memory holds no values."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._entries[storage._cdata] = _Entry(reference, state, tensor.dtype, tuple(tensor.shape), fill)

    def forget(self, tensor: Tensor) -> None:
        """A tensor has values now."""
        if not tensor.is_meta:
            self._entries.pop(tensor.untyped_storage()._cdata, None)

    def settle(self, tensors: Iterable[Tensor]) -> None:
        """Write what is pending in these: somebody is about to look."""
        for tensor in tensors:
            entry = self._entry(tensor)
            if entry is not None and entry.state is State.PENDING:
                self._fill(tensor.untyped_storage(), entry)

    def settle_all(self) -> None:
        """Write all that is pending, wherever it is held."""
        for entry in [*self._entries.values()]:
            if entry.state is State.PENDING and entry.is_live:
                self._fill(torch.UntypedStorage._new_with_weak_ptr(entry.storage.cdata), entry)

    def drawn(self) -> list[str]:
        """Return what memory of random numbers is in use, as ``float32[3]``."""
        if any(entry.state is State.DRAWN and entry.is_live for entry in self._entries.values()):
            gc.collect()  # it may be held by nothing but a cycle
        live = [entry for entry in self._entries.values() if entry.state is State.DRAWN and entry.is_live]
        return [f"{entry.dtype}{[*entry.shape]}".removeprefix("torch.") for entry in live]

    def _entry(self, tensor: Tensor) -> _Entry | None:
        if tensor.is_meta or not self._entries or tensor.layout is not torch.strided:
            return None
        return self._entries.get(tensor.untyped_storage()._cdata)

    def _fill(self, storage: torch.UntypedStorage, entry: _Entry) -> None:
        self._entries.pop(storage._cdata, None)
        shape = (storage.nbytes() // entry.dtype.itemsize,)
        torch.empty(0, dtype=entry.dtype).set_(storage, 0, shape, (1,)).fill_(entry.fill)
