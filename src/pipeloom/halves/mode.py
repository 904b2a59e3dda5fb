"""The forward of a stage, torch function by torch function: which are split, and what becomes of their weights.

A tensor that requires a gradient is on one of two sides. *Weights* are parameters and what is computed from them
alone (``weight * mask``, a weight norm); everything else is an *activation*. Most functions see activations only, and
run as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeloom.errors import RuntimeStateError
from pipeloom.halves.frames import Frames, saving, top_hooks
from pipeloom.halves.functions import COMPOSITE, PLAIN, body, is_product, is_worth_it, writes
from pipeloom.halves.nodes import gate, is_one_product, phony, place, split
from pipeloom.halves.tensors import exchanged, is_foreign, is_transformed, tensors_of
from pipeloom.halves.waiting import Waiting

_is_compiling, _is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_current_backward = torch._C._current_graph_task_id


class SplitMode(TorchFunctionMode):
    """Splits functions while a stage's forward runs, and while a checkpoint in it runs again.

    In one micro-batch all gradients of a parameter come in the same half: in W if the first function that uses it is
    split, in I if not. So they are added up as in the whole backward.

    Args:
        waiting: where gradients wait for W.

    Attributes:
        in_w: the parameters whose gradients come in W, by their ids.
        in_i: likewise those that functions used which are not split.
        shared: likewise those that are used inside and outside of a reentrant checkpoint.
    """

    def __init__(self, waiting: Waiting) -> None:
        super().__init__()
        self._waiting = waiting
        self._frames = Frames()
        # By id, and kept, so that no other tensor gets the id.
        self.in_w: dict[int, Tensor] = {}
        self.in_i: dict[int, Tensor] = {}
        self.shared: dict[int, Tensor] = {}
        self._backward_of: dict[int, int] = {}
        self._has_computed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Code that is being compiled stays whole.
        if _is_compiling() or func in PLAIN:
            return func(*args, **kwargs)
        if func in COMPOSITE:
            with self:
                return body(func)(*args, **kwargs)
        if not _is_grad_enabled() or not self._concerns(args, kwargs):
            return func(*args, **kwargs)
        weights, others = _sides(args, kwargs)
        if not weights or is_foreign(types) or is_transformed():
            return func(*args, **kwargs)
        return self._with_weights(func, args, kwargs, weights, others)

    def _concerns(self, args: Any, kwargs: Any) -> bool:
        """Whether there may be weights; most calls end here, so it only looks at types."""
        for each in (*args, *kwargs.values()) if kwargs else args:
            kind = type(each)
            if kind is nn.Parameter or kind is list or kind is tuple:
                return True
            if self._has_computed and kind is Tensor and hasattr(each, "pipeloom_source"):
                return True
        return False

    def _with_weights(self, func: Any, args: Any, kwargs: Any, weights: list[Tensor], others: list[Tensor]) -> Any:
        self._note_backward(weights)
        if writes(func, kwargs):
            return self._whole(func, args, kwargs, weights, is_writing=True)
        is_new = is_product(func)
        is_weight = _makes_weight(weights, others, is_product=is_new)
        is_split = is_weight or (is_new and is_worth_it(func, args, weights, others))
        if not is_split or any(id(each) in self.in_i for each in weights):
            return self._whole(func, args, kwargs, weights)
        self.in_w.update((id(each), each) for each in weights if type(each) is nn.Parameter)
        return self._weight(func, args, kwargs) if is_weight else self._split(func, args, kwargs)

    def _note_backward(self, weights: list[Tensor]) -> None:
        """Which backward runs while a weight is used: in a reentrant checkpoint one does, and elsewhere none."""
        number = _current_backward()
        for each in weights:
            if self._backward_of.setdefault(id(each), number) != number and type(each) is nn.Parameter:
                self.shared[id(each)] = each

    def _whole(self, func: Any, args: Any, kwargs: Any, weights: list[Tensor], *, is_writing: bool = False) -> Any:
        """As it is: a weight that is in W goes in through a gate; other parameters are in I from now on."""
        is_late = [type(each) is not nn.Parameter or id(each) in self.in_w for each in weights]
        if any(is_late):
            args, kwargs = self._behind_gates(args, kwargs, args[0] if is_writing and args else None)
        made = func(*args, **kwargs)
        if any(each.requires_grad for each in tensors_of(made)):
            self.in_i.update((id(each), each) for each, late in zip(weights, is_late, strict=True) if not late)
        return made

    def _behind_gates(self, args: Any, kwargs: Any, written: Any) -> tuple[Any, Any]:
        def swap(tensor: Tensor) -> Tensor:
            source = _source(tensor)
            if source is None and id(tensor) in self.in_w:
                source = tensor
            # A view, whose node has the number of this use: W adds up in the order of uses.
            return tensor if source is None or tensor is written else self._gated(source.view_as(source))

        return exchanged(args, swap), exchanged(kwargs, swap)

    def _weight(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A weight computed from weights; code that is not split meets it behind a gate."""

        def known(made: Tensor) -> Tensor:
            if not made.requires_grad or made.is_leaf:
                return made
            gated: Any = self._gated(made)
            gated.pipeloom_source = (made, gated._version)
            self._has_computed = True
            return gated  # type: ignore[no-any-return]

        return exchanged(func(*exchanged(args, _ungated), **exchanged(kwargs, _ungated)), known)

    def _split(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A small graph for the function, and a node in the stage's graph that stands for it."""
        weight = args[1] if not kwargs and is_one_product(func, args) else None
        activations: list[Tensor] = []
        inputs: list[Tensor] = []

        def swap(tensor: Tensor) -> Tensor:
            source = _ungated(tensor)
            if source is not tensor or type(tensor) is nn.Parameter or not tensor.requires_grad:
                return source
            activations.append(tensor)
            inputs.append(tensor.detach() if weight is not None else tensor.detach().requires_grad_())
            return inputs[-1]

        output = self._small(func, exchanged(args, swap), exchanged(kwargs, swap) if kwargs else kwargs)
        if weight is not None:
            weight, inputs = (_ungated(weight).detach() if activations else None), []
        where = place(self._waiting, self._frames, output, tuple(inputs), weight)
        return split(where, (output,), *(activations or (phony(output),)))

    def _small(self, func: Any, args: Any, kwargs: Any) -> Any:
        hooks = top_hooks()
        frame, is_first = (None, False) if hooks is None else self._frames.current(hooks)
        if frame is None:
            return func(*args, **kwargs)
        with saving(is_first=is_first):
            return func(*args, **kwargs)

    def _gated(self, weight: Tensor) -> Tensor:
        gated: Tensor = gate(place(self._waiting, self._frames, weight, None), (weight,), phony(weight))
        return gated


def has_weights(args: Any, kwargs: Any) -> bool:
    """Whether a call is given weights that are trained."""
    return bool(_sides(args, kwargs)[0])


def _sides(args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The weights that require a gradient, and all other tensors."""
    weights: list[Tensor] = []
    others: list[Tensor] = []
    for each in tensors_of(args) if not kwargs else tensors_of((*args, *kwargs.values())):
        is_weight = each.requires_grad and (type(each) is nn.Parameter or _source(each) is not None)
        (weights if is_weight else others).append(each)
    return weights, others


def _source(tensor: Tensor) -> Tensor | None:
    """The weight behind a gate, or None if it is none, or was written into since.

    Raises:
        RuntimeStateError: its memory was written into by way of another tensor.
    """
    found: tuple[Tensor, int] | None = getattr(tensor, "pipeloom_source", None)
    if found is None:
        return None
    source, version = found
    if tensor._version == version:
        return source
    if tensor.grad_fn is not None and tensor.grad_fn.name() == "GateBackward":
        raise RuntimeStateError(
            f"a weight {tuple(tensor.shape)} that is computed from parameters shares memory with a tensor that was "
            "written into; where the backward is split into I and W, its gradient could not be told apart",
            "clone() it before the write, or use a schedule with whole backwards (1f1b, gpipe)",
        )
    return None


def _ungated(tensor: Tensor) -> Tensor:
    source = _source(tensor)
    return tensor if source is None else source


def _makes_weight(weights: list[Tensor], others: list[Tensor], *, is_product: bool) -> bool:
    """Whether the output is a weight too: of weights alone, or with masks and the like, which are no larger."""
    if not others:
        return True
    if is_product or any(each.requires_grad for each in others):
        return False
    size = max(each.numel() for each in weights)
    return all(each.numel() <= size for each in others)
