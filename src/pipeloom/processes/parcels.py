"""Parcels, and how they are described: in full when that is new on a way, by a number from then on."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.batch.trees import flatten, unflatten
from pipeloom.errors import BatchError
from pipeloom.processes.wire import CACHE_LINE, Description, Plain

SMALL_BYTES = 1 << 14
"""Up to this a rank reads what it gets itself; it has to fit into buffers of its system while the rank computes."""
MAX_DESCRIPTIONS = 256


class Parcel(NamedTuple):
    """Leaves on their way.

    Args:
        leaves: tensors and plain values.
        form: what makes something of them; can be pickled.
        is_usual: the form is one of a few that come again and again, and can be hashed.
    """

    leaves: tuple[Any, ...]
    form: Any
    is_usual: bool = False


def parcel_of(value: Any) -> Parcel:
    """Any value, its tensors through the processor's memory."""
    leaves, structure = flatten(value)
    on_cpu = [leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return Parcel(tuple(on_cpu), unflatten(list(range(len(leaves))), structure))


def value_of(parcel: Parcel) -> Any:
    """What `parcel_of` made a parcel of."""
    return unflatten(list(parcel.leaves), flatten(parcel.form)[1])


def weights_parcel(values: Iterable[Tensor | None]) -> Parcel:
    """Weights, or their gradients, through the processor's memory; an embedding's gradient may be sparse."""
    leaves: list[Tensor | None] = []
    forms: list[Any] = []
    for value in values:
        is_sparse = value is not None and value.is_sparse
        if value is not None and is_sparse:
            leaves += [value._indices().cpu(), value._values().cpu()]
        else:
            leaves.append(None if value is None else value.cpu())
        forms.append((tuple(value.shape), value.is_coalesced()) if value is not None and is_sparse else None)
    return Parcel(tuple(leaves), tuple(forms))


def weights_of(parcel: Parcel) -> list[Tensor | None]:
    """What `weights_parcel` made a parcel of."""
    leaves, found = iter(parcel.leaves), []
    for form in parcel.form:
        if form is None:
            found.append(next(leaves))
        else:
            shape, is_coalesced = form
            found.append(torch.sparse_coo_tensor(next(leaves), next(leaves), shape, is_coalesced=is_coalesced))
    return found


class Known:
    """A description that came over a way."""

    __slots__ = ("description", "form", "only")

    def __init__(self, description: Description, form: Any) -> None:
        self.description = description
        self.form = form
        self.only = _only(description)

    def tensor(self, body: memoryview, start: int) -> Tensor:
        """The one tensor, from a message's end; in memory of its own, because a message lies anywhere in its line."""
        assert self.only is not None, "asked only of one tensor"
        shape, dtype = self.only
        room = torch.empty(shape, dtype=dtype)
        # torch would take four calls for it, which a thread that was just woken runs many times slower than a loop.
        ctypes.memmove(room.data_ptr(), bytes(body[start:]), room.nbytes)
        return room


class Way:
    """The descriptions that one rank has sent to another over one kind of connection."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.short: dict[Hashable, int] = {}

    def numbered(self, text: bytes) -> tuple[int, bytes]:
        """The number of a description, and its text if that is new; old ones are forgotten, not piled up."""
        if text in self._numbers:
            return self._numbers[text], b""
        if len(self._numbers) == MAX_DESCRIPTIONS:
            self._numbers.clear()
            self.short.clear()
        self._numbers[text] = len(self._numbers)
        return self._numbers[text], text


def pickled(description: Description, form: Any) -> bytes:
    """A description in full.

    Raises:
        BatchError: it has a type that another process can't find.
    """
    try:
        return pickle.dumps((description, form))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise BatchError(
            f"what a stage handed on can't be named to another process: {error}",
            "define its types (named tuples, dataclasses) at the top level of a module, not inside a function",
        ) from None


def short_of(parcel: Parcel) -> Hashable:
    """What says all of a parcel that is one small tensor, alone in its memory; None for other parcels."""
    if len(parcel.leaves) != 1 or type(leaf := parcel.leaves[0]) is not Tensor:
        return None
    is_plain = leaf.layout is torch.strided and leaf.is_cpu and leaf.is_contiguous() and not leaf.is_neg()
    if not is_plain or not 0 < leaf.nbytes <= SMALL_BYTES:
        return None
    if leaf.dtype.is_complex or leaf.is_quantized or not (at := leaf.data_ptr()) or at % CACHE_LINE:
        return None
    return leaf.shape, leaf.dtype, parcel.form


def _only(description: Description) -> tuple[tuple[int, ...], torch.dtype] | None:
    """The shape and dtype of the one tensor that fills its memory, if that is all there is."""
    if len(description.distinct) != 1 or len(description.places) != 1 or isinstance(description.distinct[0], Plain):
        return None
    lying, stretch = description.distinct[0], description.stretches[0]
    meant = torch.empty(lying.shape, dtype=lying.dtype, device="meta")
    is_whole = lying.strides == meant.stride() and stretch.num_bytes == stretch.extent_bytes == meant.nbytes
    return (lying.shape, lying.dtype) if is_whole and stretch.phase == 0 and stretch.num_bytes else None
