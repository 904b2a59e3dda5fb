"""What crosses a cut: a tree of tensors, handed over so that each side has its own piece of the graph.

The receiver's leaves are detached, so an in-place first layer (``nn.ReLU(inplace=True)``) would fail on "a leaf
Variable that requires grad". It gets an alias with a graph edge instead, and may write into it as it could in the
uncut model; the version counter is shared, so a write that spoils the sender's backward is still caught by autograd.
An alias is a function in Python, there and back; a stage that was seen only to read gets the leaf itself (`InputUse`).
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from pipeloom.batch.copies import Alias, copied_alike
from pipeloom.batch.trees import LEAF, flatten, unflatten
from pipeloom.errors import BatchError
from pipeloom.runtime.buffer_history import storage, version

_CROSSING = (Tensor, type(None), Number, str, bytes, enum.Enum, range, slice, torch.dtype, torch.device, torch.Size)

_UNGUARDED = nullcontext()

_ONE_ARGUMENT = flatten(((None,), {}))[1]


class Collector:
    """A leaf of a stage's graph, and the gradient that came to it, laid out as it came.

    Autograd lays a leaf's gradient out as the leaf is. In the uncut model this is no leaf: its gradient goes on as it
    is, and kernels sum by layout, so another one has other bits [seen with ConvNeXt, whose blocks permute].

    Args:
        leaf: detached.
    """

    __slots__ = ("_came", "_hooks", "leaf")

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf.requires_grad_()
        self._came: list[Tensor] = []
        strides, came = leaf.stride() if leaf.layout is torch.strided else None, self._came

        def note(grad: Tensor) -> None:
            if grad.layout is not torch.strided or grad.stride() != strides:
                came.append(grad)

        # Private: what `register_hook` ends in. Its handle, which nobody wants, takes longer than all else that a
        # boundary does for a forward. No handle has a negative number. Seen with torch 2.13.
        self._hooks: dict[int, Callable[[Tensor], Tensor | None]] = OrderedDict([(-1, note)])
        leaf._backward_hooks = self._hooks

    def go_last(self) -> None:
        """Look at the gradient after the hooks that the stage's own code put on its input, which may change it."""
        if len(self._hooks) > 1:
            self._hooks[-1] = self._hooks.pop(-1)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, once there is one."""
        return self._came[0] if self._came else self.leaf.grad


@dataclass(slots=True)  # not frozen: that makes one ten times as slow to make, with other ranks waiting for it
class Message:
    """A value on its way to the next stage.

    Args:
        leaves: the leaves of the tree, tensors detached; a tensor that was there twice is there twice.
        structure: the tree without its leaves.
        needs_grad: per leaf, whether its gradient has to come back.
    """

    leaves: tuple[Any, ...]
    structure: Any
    needs_grad: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any, part: Callable[[Tensor], Tensor] = Tensor.detach) -> tuple[Message, tuple[Any, ...]]:
        """Pack a stage's output; also return its leaves with their graph, for the backward.

        Args:
            value: the output.
            part: makes of each tensor what leaves the stage.

        Raises:
            BatchError: a leaf is no tensor and no plain value.
        """
        if type(value) is Tensor:  # most stages return one; what follows is on every other rank's way
            return cls((part(value),), LEAF, (value.requires_grad,)), (value,)
        leaves, structure = flatten(value)
        for leaf in leaves:
            _check_leaf(leaf)
        needs_grad = tuple(map(_requires_grad, leaves))
        return cls(_each_once(leaves, part), structure, needs_grad), tuple(leaves)

    def skeleton(self) -> Any:
        """The value with numbers for its leaves, which can be pickled where its type can."""
        return unflatten(list(range(len(self.leaves))), self.structure)

    @classmethod
    def of_inputs(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Message:
        """Pack the model's own inputs."""
        if len(args) == 1 and type(args[0]) is Tensor and not kwargs:  # most models; the first rank has all wait for it
            return cls((_with_its_own_version(args[0]),), _ONE_ARGUMENT, (args[0].requires_grad,))
        leaves, structure = flatten((args, kwargs))
        needs_grad = tuple(map(_requires_grad, leaves))
        return cls(_each_once(leaves, _with_its_own_version), structure, needs_grad)

    def to(self, device: torch.device | None) -> Message:
        """The same message on the receiver's device; without a copy if it is there already."""
        if device is None:
            return self
        return Message(_each_once(self.leaves, partial(_moved, device)), self.structure, self.needs_grad)

    @property
    def is_one_tensor(self) -> bool:
        """Whether it is a tensor, in no container, whose gradient has to come back."""
        return len(self.leaves) == 1 and self.structure.container is None and self.needs_grad[0]

    def opened(self) -> tuple[Any, tuple[Collector | None, ...]]:
        """Unpack for a forward under autograd.

        Returns:
            The value to compute with, and per leaf what collects its gradient (None: none is due).
        """
        if not any(self.needs_grad):
            return self.value(), (None,) * len(self.leaves)
        collectors = {
            id(leaf): Collector(leaf.detach())
            for leaf, needs_grad in zip(self.leaves, self.needs_grad, strict=True)
            if needs_grad
        }
        aliases = {key: Alias.apply(each.leaf) for key, each in collectors.items()}  # type: ignore[no-untyped-call]
        used = [aliases.get(id(leaf), leaf) for leaf in self.leaves]
        # The gradient of a tensor that came twice goes back once.
        inputs = tuple(collectors.pop(id(leaf), None) for leaf in self.leaves)
        return unflatten(used, self.structure), inputs

    def opened_to_read(self, *, is_last_use: bool) -> tuple[Tensor, tuple[Collector | None, ...]]:
        """The same for `is_one_tensor`, without the alias: a write in place raises torch's `RuntimeError`.

        Args:
            is_last_use: nobody opens this message or asks for its `value` again, so its own tensor may collect.
        """
        collector = Collector(self.leaves[0] if is_last_use else self.leaves[0].detach())
        return collector.leaf, (collector,)

    def guarded(self, *, is_recomputed: bool) -> AbstractContextManager[None]:
        """Put this around the forward that uses `opened`.

        Leaves may share memory: a tensor and a view of it. In the uncut model autograd knows, and a write into one
        reaches the gradient of the other. Across a cut each has a graph of its own, and nothing would tell.

        Args:
            is_recomputed: the forward runs again later, from copies of what it wrote into.

        Raises:
            BatchError: the forward wrote into one of two leaves that overlap.
        """
        return _UNGUARDED if len(self.leaves) < 2 else self._guarded(is_recomputed)

    @contextmanager
    def _guarded(self, is_recomputed: bool) -> Iterator[None]:
        tensors = [
            leaf
            for leaf, needs_grad in zip(self.leaves, self.needs_grad, strict=True)
            if isinstance(leaf, Tensor) and (needs_grad or is_recomputed)
        ]
        pairs = [
            (one, other, version(one) + version(other))
            for one, other in combinations(tensors, 2)
            if one is not other and storage(one) == storage(other) is not None
        ]
        yield
        for one, other, before in pairs:
            if version(one) + version(other) != before and _overlap(one, other):
                raise BatchError(
                    f"a stage wrote in place into one of its inputs {_describe(one)} and {_describe(other)}, which "
                    "share memory; across a cut, autograd cannot tell what that does to the gradient of the other",
                    "let the stage before return x.clone() of one of them, or do not write in place",
                )

    def value(self) -> Any:
        """Unpack without a graph."""
        return unflatten(list(self.leaves), self.structure)


@dataclass(slots=True)
class Gradients:
    """The gradients of a stage's input on their way to the stage before.

    Args:
        leaves: per leaf of the input; None where none is due.
        is_apart: they are scaled when the step ends, so they may not join earlier ones before that.
    """

    leaves: tuple[Tensor | None, ...]
    is_apart: bool

    def to(self, device: torch.device | None) -> Gradients:
        """The same on the receiver's device; without a copy if they are there already."""
        return self if device is None else Gradients(_each_once(self.leaves, partial(_moved, device)), self.is_apart)


class InputUse:
    """Whether a stage writes into its input in place, found by looking.

    What it did once it may not do always (``if self.training:``). If a stage that only read so far writes, torch
    refuses before anything is written, and the forward begins again with an alias. The random draws are the same
    then; buffers would be updated twice, so a stage that has any always gets an alias.

    Args:
        module: the stage's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._has_buffers = any(True for _ in module.buffers())
        self._is_known = False
        self._is_written = False

    @property
    def is_reading(self) -> bool:
        """Whether it was seen, and only read."""
        return self._is_known and not self._is_written and not self._has_buffers

    def note(self, is_written: bool) -> None:
        """What a forward did."""
        self._is_known = True
        self._is_written = self._is_written or is_written

    def note_refusal(self, error: RuntimeError) -> bool:
        """Whether the error is torch's refusal to write into a leaf; if so, this stage writes from now on."""
        is_refusal = "leaf Variable that requires grad" in str(error)
        self._is_written = self._is_written or is_refusal
        return is_refusal


class KeptInput:
    """The input of a stage that recomputes, as it was before the forward.

    A forward may write into its input, and hand the very same memory on as its output; so what it wrote over can't be
    put back, and the second forward needs a copy. But a copy at another address may round differently [seen with
    MKL's matrix products on slices of a batch]: copies are aligned like their originals, and what the forward did
    not write into is not copied. If a later stage writes into that, because it was handed on, there is nothing left to
    recompute from.

    Args:
        message: the input, before the forward.
    """

    __slots__ = ("_copies", "_message", "_tensors")

    def __init__(self, message: Message) -> None:
        self._message = message
        tensors = [leaf for leaf in message.leaves if isinstance(leaf, Tensor)]
        self._tensors = {id(tensor): (tensor, version(tensor)) for tensor in tensors}
        self._copies = {key: copied_alike(tensor) for key, (tensor, _) in self._tensors.items()}

    def forget_unchanged(self) -> None:
        """After the forward: drop the copies of what it did not write into."""
        is_written = {key: version(tensor) != before for key, (tensor, before) in self._tensors.items()}
        self._copies = {key: copy for key, copy in self._copies.items() if is_written[key]}

    def as_it_was(self) -> Message:
        """The input before the forward.

        Raises:
            BatchError: another stage has written into it since.
        """
        self.check_untouched()
        return replace(self._message, leaves=tuple(self._copies.get(id(leaf), leaf) for leaf in self._message.leaves))

    def check_untouched(self) -> None:
        """Before and after a recompute: a rank that writes does not wait for this one to have read.

        Raises:
            BatchError: another stage has written into the input since the forward.
        """
        for key, (tensor, before) in self._tensors.items():
            if key not in self._copies and version(tensor) != before:
                raise BatchError(
                    f"a stage that recomputes was given {_describe(tensor)} and handed its memory on, and a later "
                    "stage wrote into that in place; the stage would recompute from other numbers",
                    "let it return x.clone() of what it hands on, do not write in place, or leave its recompute off",
                )


def _each_once(leaves: Sequence[Any], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """Change the tensors; one that is there twice becomes one that is there twice."""
    changed = {id(leaf): change(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    return tuple(changed.get(id(leaf), leaf) for leaf in leaves)


def _moved(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device, non_blocking=True)


def _with_its_own_version(tensor: Tensor) -> Tensor:
    """The same memory, where writes are counted apart.

    Micro-batches are views of one batch, and autograd counts writes for all views of a tensor together: a first layer
    that works in place would seem to spoil what *another* micro-batch has saved for its backward.
    """
    return tensor if tensor.requires_grad or tensor.is_inference() else tensor.data


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether an element of one lies where an element of the other does; slow, and exact for one type of number."""
    if one.dtype != other.dtype:
        return True
    is_used = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    is_used.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(is_used.as_strided(other.shape, other.stride(), other.storage_offset()).any())


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
        # Private: what `torch.autograd.backward` ends in. The checks before it (of gradients' shapes, which a boundary
        # keeps) cost a rank that just woke up 0.1 ms a micro-batch. The same in torch 2.9 and 2.13.
        tensors, seeds = zip(*pairs, strict=True)
        _engine_run_backward(tensors, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)


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
