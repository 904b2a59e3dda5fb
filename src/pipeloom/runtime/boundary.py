"""What crosses a cut: a tree of tensors, handed over so that each side has its own piece of the graph.

The receiver's leaves are detached, so an in-place first layer (``nn.ReLU(inplace=True)``) would fail on "a leaf
Variable that requires grad". It gets an alias with a graph edge instead, and may write into it as it could in the
uncut model; the version counter is shared, so a write that spoils the sender's backward is still caught by autograd.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import BatchError
from pipeloom.runtime.trees import flatten, unflatten

_CROSSING = (
    Tensor,
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
)

_CACHE_LINE = 64


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0]


@dataclass(frozen=True, slots=True)
class Message:
    """A value on its way to the next stage.

    Args:
        leaves: the leaves of the tree, tensors detached.
        structure: the tree without its leaves.
        needs_grad: per leaf, whether its gradient has to come back.
    """

    leaves: tuple[Any, ...]
    structure: Any
    needs_grad: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any) -> tuple[Message, tuple[Any, ...]]:
        """Pack a stage's output; also return its leaves with their graph, for the backward.

        Raises:
            BatchError: a leaf is no tensor and no plain value.
        """
        leaves, structure = flatten(value)
        for leaf in leaves:
            _check_leaf(leaf)
        needs_grad = tuple(map(_requires_grad, leaves))
        detached = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(detached, structure, needs_grad), tuple(leaves)

    @classmethod
    def of_inputs(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Message:
        """Pack the model's own inputs."""
        leaves, structure = flatten((args, kwargs))
        return cls(tuple(leaves), structure, tuple(map(_requires_grad, leaves)))

    def to(self, device: torch.device | None) -> Message:
        """The same message on the receiver's device; without a copy if it is there already."""
        if device is None:
            return self
        moved = tuple(leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)
        return Message(moved, self.structure, self.needs_grad)

    def opened(self) -> tuple[Any, tuple[Tensor | None, ...]]:
        """Unpack for a forward under autograd.

        Returns:
            The value to compute with, and per leaf the tensor that collects its gradient (None: none is due).
        """
        inputs = tuple(
            leaf.detach().requires_grad_() if needs_grad else None
            for leaf, needs_grad in zip(self.leaves, self.needs_grad, strict=True)
        )
        used = [
            leaf if collector is None else _Alias.apply(collector)  # type: ignore[no-untyped-call]
            for leaf, collector in zip(self.leaves, inputs, strict=True)
        ]
        return unflatten(used, self.structure), inputs

    def value(self) -> Any:
        """Unpack without a graph."""
        return unflatten(list(self.leaves), self.structure)


class KeptInput:
    """The input of a stage that recomputes, as it was before the forward.

    A forward may write into its input, and hand the very same memory on as its output; so what it wrote over can't be
    put back, and the second forward needs a copy. But a copy at another address may round differently [seen with
    MKL's matrix products on slices of a batch]: copies are aligned like their originals, and what the forward did
    not write into is not copied.

    Args:
        message: the input, before the forward.
    """

    __slots__ = ("_copies", "_message")

    def __init__(self, message: Message) -> None:
        self._message = message
        self._copies = {
            position: (_version(leaf), _copied(leaf))
            for position, leaf in enumerate(message.leaves)
            if isinstance(leaf, Tensor)
        }

    def forget_unchanged(self) -> None:
        """After the forward: drop the copies of what it did not write into."""
        leaves = self._message.leaves
        self._copies = {i: each for i, each in self._copies.items() if _version(leaves[i]) != each[0]}

    def as_it_was(self) -> Message:
        """The input before the forward."""
        leaves = list(self._message.leaves)
        for position, (_, copy) in self._copies.items():
            leaves[position] = copy
        return replace(self._message, leaves=tuple(leaves))


def _version(tensor: Tensor) -> int:
    """What changes with every write; a tensor made in inference mode counts none, and torch lets nobody write."""
    return 0 if tensor.is_inference() else tensor._version


def _copied(tensor: Tensor) -> Tensor:
    """A copy that a kernel cannot tell from the original: same strides, same place within a cache line."""
    source = tensor.detach()
    if source.device.type != "cpu" or source.layout is not torch.strided or not source.numel():
        return source.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
    room = source.new_empty(extent + 2 * _CACHE_LINE)
    start = (source.data_ptr() - room.data_ptr()) % _CACHE_LINE // source.element_size()
    # Its whole stretch of memory, because an expanded tensor can't be written element by element.
    room.narrow(0, start, extent).copy_(source.as_strided((extent,), (1,)))
    return room.as_strided(source.shape, source.stride(), start)


def detached(value: Any) -> Any:
    """The same value without its graph."""
    leaves, structure = flatten(value)
    return unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def moved(value: Any, device: torch.device | None) -> Any:
    """The same value on ``device``; as it is for None."""
    if device is None:
        return value
    leaves, structure = flatten(value)
    return unflatten([leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def run_backward(outputs: Sequence[Any], grads: Iterable[Tensor | None]) -> None:
    """Back-propagate through one stage: leaves that got no gradient, or need none, are left out."""
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and _requires_grad(output)
    ]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _check_leaf(leaf: Any) -> None:
    """An object of another kind could hide tensors, and their graph would cross the cut unseen."""
    if not isinstance(leaf, _CROSSING):
        raise BatchError(
            f"a stage returned a {type(leaf).__name__}; tensors, plain values, and tuples, lists, dicts or "
            "dataclasses of them can cross from one stage to the next",
            "return its tensors, or cut where it does not cross",
        )


def described(value: Any) -> str:
    """The leaves of a value for a message: ``float32(2, 3), None``."""
    return ", ".join(map(_describe, flatten(value)[0]))


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{tuple(leaf.shape)}"
    return repr(leaf)
