"""Which torch functions are split, which are looked into, and which are none of our business."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

P = ParamSpec("P")
R = TypeVar("R")


def _found(owner: Any, names: str) -> list[Any]:
    return [getattr(owner, name) for name in names.split() if hasattr(owner, name)]


_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
_PRODUCTS = "matmul mm bmm mv addmm addbmm baddbmm addmv inner"

CONVOLUTIONS: frozenset[Any] = frozenset(_found(functional, _CONVOLUTIONS) + _found(torch, _CONVOLUTIONS))

SPLIT: frozenset[Any] = frozenset(
    _found(functional, "linear bilinear embedding embedding_bag grouped_mm")
    + _found(torch, f"einsum tensordot {_PRODUCTS}")
    + _found(Tensor, f"__matmul__ __rmatmul__ {_PRODUCTS}")
).union(CONVOLUTIONS)
"""Where the gradient of the weight is a computation of its own, as large as the gradient of the input.

Norms, biases and scales are not here. Their gradients are a by-product of the input's (one kernel makes both for a
norm), or a sum that is soon done and needs the input of a function which is not otherwise kept.
"""

_TABLES: frozenset[Any] = frozenset(_found(functional, "embedding embedding_bag"))
_MARK = "pipeloom_is_splittable"


def splittable(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function of your own be split as `linear` is, wherever it is given a parameter.

    I walks the graph that it makes to the activations, W to the parameters. A node that makes both gradients at once,
    as an `autograd.Function` does, makes them in both halves: give each gradient a node of its own.

    Args:
        function: takes activations and parameters as its arguments, returns one tensor.
    """

    @functools.wraps(function)
    def seen(*args: P.args, **kwargs: P.kwargs) -> R:
        given = (*args, *kwargs.values())
        if has_torch_function(given):
            result: R = handle_torch_function(seen, given, *args, **kwargs)
            return result
        return function(*args, **kwargs)

    setattr(seen, _MARK, True)
    return seen


def is_product(function: Any) -> bool:
    """Whether it takes activations and weights to something new, and may be split."""
    return function in SPLIT or hasattr(function, _MARK)


COMPOSITE: frozenset[Any] = frozenset(
    [functional.multi_head_attention_forward, Tensor.backward, torch.autograd.backward, torch.autograd.grad]
)
"""Functions in Python that call the above, or run a checkpoint that does; a mode sees them as one call."""

_GETTERS = (
    "shape dtype device ndim requires_grad is_cuda is_cpu is_meta layout is_sparse is_quantized is_leaf grad grad_fn "
    "itemsize nbytes is_nested names is_mps is_xpu _version output_nr data"
)
_METHODS = (
    "size dim numel nelement element_size stride is_contiguous is_floating_point is_complex is_signed get_device "
    "storage_offset __len__ ndimension is_inference __hash__ __repr__ is_same_size detach untyped_storage data_ptr"
)
PLAIN: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in _GETTERS.split() if hasattr(Tensor, name)]
    + _found(Tensor, _METHODS)
    + _found(torch, "is_tensor is_floating_point is_complex numel result_type is_grad_enabled")
    + [torch._C._set_grad_enabled]
)
"""What no gradient passes; not looked at, because a model asks for shapes all the time."""


def body(composite: Any) -> Callable[..., Any]:
    """A composite function that does not ask whether anybody would see it as one call, and so is seen inside.

    Its globals are copied at each call: a user may have put another function in the place of one that it calls.
    """
    blind: dict[str, Any] = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never
    )
    code, names = composite.__code__, {**composite.__globals__, **blind}
    function = types.FunctionType(code, names, composite.__name__, composite.__defaults__, composite.__closure__)
    function.__kwdefaults__ = composite.__kwdefaults__
    return function


def _never(*_: Any) -> bool:
    return False


def writes(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the function writes into its first argument, or into ``out``."""
    name: str = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITING or kwargs.get("out") is not None


_WRITING = frozenset(["__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imatmul__"])

MIN_WORK = 16
"""Multiplications of W for each number that has to be kept for it, below which a function stays whole."""
MIN_MULTIPLICATIONS = 1 << 17
"""Of W, below which I would be no faster without it, and I and W take twice as long as the whole backward.

``python -m benchmarks.halves --rows functions`` measures where that is.
"""


def is_worth_it(function: Any, args: tuple[Any, ...], weights: list[Tensor], others: list[Tensor]) -> bool:
    """Whether W is enough work, and enough for what it keeps: LoRA's thin matrices and depthwise convolutions are not.

    Args:
        function: one of `SPLIT`, or `splittable`.
        args: of the call.
        weights: among them.
        others: the other tensors among them.
    """
    if hasattr(function, _MARK):
        return True
    if function is torch.einsum and len(args) > 3:
        return False
    one, other = (0, 1) if function in CONVOLUTIONS else (-2, -1)
    if not any(_work(each, one, other) >= MIN_WORK for each in weights):
        return False
    return _multiplications(function, weights, others, one, other) >= MIN_MULTIPLICATIONS


def _multiplications(function: Any, weights: list[Tensor], others: list[Tensor], one: int, other: int) -> float:
    """At least so many in W, for `linear` exactly; numbers of a table to fill, where rows of one are looked up."""
    largest = max(weights, key=Tensor.numel)
    if function in _TABLES or largest.ndim < 2:
        return largest.numel()
    # Each number of the input is multiplied once for each channel of the output.
    num_inputs = max((each.numel() for each in others), default=1)
    num_channels = largest.shape[1] if function is functional.linear else max(largest.shape[one], largest.shape[other])
    return num_inputs * largest.numel() / max(1, num_channels)


def _work(weight: Tensor, one: int, other: int) -> float:
    """Multiplications for a row of the input and one of the output, by how many numbers are in both."""
    if weight.ndim < 2:
        return 0.0
    num_channels = weight.shape[one] + weight.shape[other]
    num_matrices = weight.shape[:-2].numel() if one < 0 else 1
    return weight.numel() / max(1, num_matrices * num_channels)
