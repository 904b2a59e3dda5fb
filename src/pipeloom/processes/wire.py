"""Tensors as stretches of memory and back, so that a receiver can't tell that they came over a wire.

Sending each tensor by itself loses what a hand-over inside one process keeps: that two leaves are one tensor, that one
is a view of another (so a write into one reaches the other), strides, and the place within a cache line, on which
the rounding of some kernels depends [seen with MKL's products]. So what travels is memory: the stretches in which
the leaves lie, each once, and a description of how they lie there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import BatchError

CACHE_LINE = 64
_LARGEST_ELEMENT = 16
_SPARSENESS = 2
"""A tensor whose elements lie farther apart than this is sent without what lies between them."""


class Lying(NamedTuple):
    """How a tensor lies in a stretch: offset in bytes, strides in elements."""

    stretch: int
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Plain(NamedTuple):
    """A leaf that is no tensor."""

    value: Any


class Stretch(NamedTuple):
    """A piece of memory.

    Args:
        num_bytes: that travel.
        extent_bytes: that it occupies; more than ``num_bytes`` if only its one tensor's elements are sent.
        phase: where it starts within a cache line, in bytes.
        is_cpu: whether it is the processor's memory.
    """

    num_bytes: int
    extent_bytes: int
    phase: int
    is_cpu: bool


class Description(NamedTuple):
    """All there is to know of some leaves but the numbers.

    Args:
        distinct: the different leaves.
        places: per leaf, which of them it is.
        stretches: the memory that they need.
    """

    distinct: tuple[Lying | Plain, ...]
    places: tuple[int, ...]
    stretches: tuple[Stretch, ...]


def packed(leaves: Sequence[Any]) -> tuple[Description, list[Tensor]]:
    """Describe leaves, and give per stretch its bytes: uint8 [num_bytes], without a copy where that is possible.

    Raises:
        BatchError: a leaf can't be sent: a sparse tensor, or a subclass of Tensor with a meaning of its own.
    """
    once = {id(leaf): leaf for leaf in leaves}
    index = {key: i for i, key in enumerate(once)}
    layout = _Layout([_sendable(leaf) for leaf in once.values() if isinstance(leaf, Tensor)])
    lying = iter(layout.lying)
    distinct = tuple(next(lying) if isinstance(leaf, Tensor) else Plain(leaf) for leaf in once.values())
    places = tuple(index[id(leaf)] for leaf in leaves)
    return Description(distinct, places, tuple(layout.stretches)), layout.memory


def rooms(description: Description, device: torch.device) -> list[Tensor]:
    """Memory to receive into, per stretch: uint8 [num_bytes]; what is not the processor's lies on ``device``."""
    cpu = torch.device("cpu")
    return [_room(each, cpu if each.is_cpu else device) for each in description.stretches]


def unpacked(description: Description, memory: Sequence[Tensor]) -> tuple[Any, ...]:
    """The leaves, on the memory that `rooms` made."""
    found = [
        each.value if isinstance(each, Plain) else _tensor(each, description.stretches[each.stretch], memory)
        for each in description.distinct
    ]
    return tuple(found[place] for place in description.places)


class _Layout:
    """Which stretches some tensors lie in."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.stretches: list[Stretch] = []
        self.memory: list[Tensor] = []
        self.lying: list[Lying] = []
        storages: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        index = {key: self._add(sharing) for key, sharing in storages.items()}
        for tensor in tensors:
            number, start = index[tensor.untyped_storage()._cdata]
            offset = _bounds(tensor)[0] - start
            self.lying.append(Lying(number, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype))

    def _add(self, sharing: Sequence[Tensor]) -> tuple[int, int]:
        bounds = [_bounds(tensor) for tensor in sharing if tensor.numel()] or [(0, 0)]
        start, end = min(low for low, _ in bounds), max(high for _, high in bounds)
        first = sharing[0]
        is_loose = len(sharing) == 1 and (end - start) > _SPARSENESS * first.numel() * first.element_size()
        part = first.detach().contiguous().view(-1).view(torch.uint8) if is_loose else _bytes(first, start, end)
        base = first.untyped_storage().data_ptr()
        base -= base % _LARGEST_ELEMENT  # memory from elsewhere (numpy) may begin within an element; here it may not
        phase = (base + start) % CACHE_LINE if end else 0
        self.stretches.append(Stretch(part.numel(), end - start, phase, first.device.type == "cpu"))
        self.memory.append(part)
        return len(self.stretches) - 1, start


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one behind its last."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return start, start
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + int(extent) * tensor.element_size()


def _bytes(tensor: Tensor, start: int, end: int) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (end - start,))  # type: ignore[call-overload, no-any-return]


def _room(stretch: Stretch, device: torch.device) -> Tensor:
    if stretch.num_bytes != stretch.extent_bytes:
        return torch.empty(stretch.num_bytes, dtype=torch.uint8, device=device)
    return torch.empty(stretch.num_bytes + stretch.phase, dtype=torch.uint8, device=device)[stretch.phase :]


def _tensor(lying: Lying, stretch: Stretch, memory: Sequence[Tensor]) -> Tensor:
    room = memory[lying.stretch]
    itemsize = lying.dtype.itemsize
    if stretch.num_bytes == stretch.extent_bytes:
        start = room.storage_offset() + lying.offset_bytes
        flat = torch.empty(0, dtype=lying.dtype, device=room.device)
        return flat.set_(room.untyped_storage(), start // itemsize, lying.shape, lying.strides)
    num_elements = (stretch.phase + stretch.extent_bytes) // itemsize
    wide = torch.empty(num_elements, dtype=lying.dtype, device=room.device)
    found = wide.as_strided(lying.shape, lying.strides, stretch.phase // itemsize)
    return found.copy_(room.view(lying.dtype).view(lying.shape))


def _sendable(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_quantized:
        of = "quantized" if tensor.is_quantized else tensor.layout
        kind = f"a {of} tensor" if type(tensor) is Tensor else f"a {type(tensor).__name__}"
        raise BatchError(
            f"a stage handed on {kind}; between processes plain dense tensors can travel",
            "return a dense tensor (x.to_dense(), x.to_local()), or cut where it does not cross",
        )
    return tensor.detach().resolve_conj().resolve_neg()


def shapes(leaves: Iterable[Any]) -> list[tuple[torch.dtype, torch.Size] | None]:
    """What a gradient of each leaf has to be like; None for what is no tensor."""
    return [(leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
