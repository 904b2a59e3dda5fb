"""What a model's own code does between its units: torch functions, seen one by one as they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode

from pipeloom.standins.placeholder import NoNumbers, Placeholder


def _words(text: str) -> list[str]:
    return text.split()


Glue = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_GETTERS = [
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "layout",
    "is_sparse",
    "is_quantized",
    "is_leaf",
    "grad_fn",
    "itemsize",
    "nbytes",
    "is_nested",
    "names",
    "is_mps",
    "is_xpu",
    "_version",
    "output_nr",
]
_METHODS = [
    "size",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "stride",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "get_device",
    "storage_offset",
    "__len__",
    "has_names",
    "ndimension",
    "is_inference",
    "__hash__",
    "__repr__",
    "__str__",
    "__format__",
    "is_same_size",
    "is_conj",
    "is_neg",
    "untyped_storage",
    "_is_view",
    "is_pinned",
    "data_ptr",
]
_FUNCTIONS = [
    "is_tensor",
    "is_floating_point",
    "is_complex",
    "is_nonzero",
    "numel",
    "result_type",
    "is_same_size",
    "is_inference",
]


def _metadata() -> frozenset[Any]:
    found = [getattr(Tensor, name).__get__ for name in _GETTERS if hasattr(Tensor, name)]
    found += [getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)]
    found += [getattr(torch, name) for name in _FUNCTIONS if name != "is_nonzero"]
    # The end of a stage leaves a `no_grad` in the middle, and that has to put the mode back all the same.
    found.append(torch._C._set_grad_enabled)
    return frozenset(found)


METADATA = _metadata()
"""Functions that ask for a shape or a type, or leave a tensor as it is: no matter of numbers, so no glue."""

_SIZES = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "nbytes")]
    + [getattr(Tensor, name) for name in ("size", "numel", "nelement", "stride", "__len__")]
    + [torch.numel, torch.is_same_size, Tensor.is_same_size]
)

_TENSOR_READS = _words(
    "__bool__ item tolist __int__ __float__ __index__ numpy __array__ equal nonzero masked_select unique "
    "repeat_interleave unique_consecutive is_nonzero __contains__ allclose"
)
_READS = _words(
    "nonzero masked_select unique equal allclose is_nonzero repeat_interleave bincount unique_consecutive argwhere"
)
READS = frozenset([getattr(Tensor, name) for name in _TENSOR_READS] + [getattr(torch, name) for name in _READS])
"""What gives Python a number, or a shape that depends on numbers: the model's code may take another way for it."""

_SHAPES = [
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
    "new_empty_strided",
]
SHAPES = frozenset(getattr(where, name) for where in (torch, Tensor) for name in _SHAPES if hasattr(where, name))
"""What makes a tensor like another, whatever its numbers are."""

_DRAWING = [
    "dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "dropout_",
    "bernoulli",
    "bernoulli_",
    "multinomial",
    "normal",
    "normal_",
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "poisson",
    "rrelu",
    "rrelu_",
    "gumbel_softmax",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "uniform_",
    "random_",
    "exponential_",
    "cauchy_",
    "geometric_",
    "log_normal_",
    "trunc_normal_",
    "native_dropout",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
]
DRAWS = frozenset(_DRAWING)


_TURNED: dict[Any, Any] = {Tensor.lt: Tensor.gt, Tensor.le: Tensor.ge}
"""Python asks a subclass first: where b is a placeholder and a is not, it calls ``b.lt(a)`` for ``a > b``."""


class Seen(TorchFunctionMode):
    """Hands every torch function to ``glue``, but those that ask for metadata.

    Args:
        glue: is handed each.
        is_stage: whether it is a stage that runs, and not a dry run.

    Attributes:
        checkpoints: of `torch.utils.checkpoint`, what was asked of those that the code is inside of.
    """

    def __init__(self, glue: Glue, *, is_stage: bool = False) -> None:
        self.see = self._glue = glue
        self._is_stage = is_stage
        self.checkpoints: list[tuple[bool, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in METADATA:
            if self._is_stage and func in _SIZES:
                _check_sizes((*args, *(kwargs or {}).values()))
            return func(*args, **(kwargs or {}))
        if func in _TURNED and isinstance(args[-1], Tensor) and len(args) == 2:
            return self._glue(_TURNED[func], (args[1], args[0]), {})
        if func is Tensor.__iter__:  # an iterator holds tensors that nobody would see
            return iter(self._glue(Tensor.unbind, args, {}))
        return self._glue(func, args, kwargs or {})


def _check_sizes(asked: tuple[Any, ...]) -> None:
    for each in asked:
        if isinstance(each, Placeholder) and each.is_uncertain:
            raise NoNumbers(f"the shape of {each!r} depends on numbers, and only the stage that made it has them")


def current() -> Seen | None:
    """The mode that sees the code which runs now: a parent's."""
    stack: list[Any] = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((each for each in reversed(stack) if isinstance(each, Seen)), None)


class unseen:  # noqa: N801  (a context manager; a class, because every call of every unit enters one)
    """Take ``mode`` off this thread's stack for a while; those that were pushed above it stay."""

    __slots__ = ("_above", "_mode")

    def __init__(self, mode: Seen) -> None:
        self._mode = mode
        self._above: list[Any] = []

    def __enter__(self) -> None:
        while (top := torch._C._pop_torch_function_stack()) is not self._mode:
            self._above.append(top)
        self._restore()

    def __exit__(self, *_: object) -> None:
        for _each in self._above:
            torch._C._pop_torch_function_stack()
        torch._C._push_on_torch_function_stack(self._mode)
        self._restore()

    def _restore(self) -> None:
        for each in reversed(self._above):
            torch._C._push_on_torch_function_stack(each)


def read(out: Any) -> Any:
    """What Python learned from a call: a number, or shapes."""
    found = tensors_in(out, [])
    return [tuple(each.shape) for each in found] if found else out


def tensors_in(value: Any, found: list[Tensor]) -> list[Tensor]:
    """The tensors of a function's arguments, in order; arguments are plain containers."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for each in value:
            tensors_in(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            tensors_in(each, found)
    return found


def exchanged(value: Any, swap: Callable[[Tensor], Tensor]) -> Any:
    """The same arguments with other tensors in them."""
    if isinstance(value, Tensor):
        return swap(value)
    if isinstance(value, list | tuple):
        new = [exchanged(each, swap) for each in value]
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if isinstance(value, dict):
        return {key: exchanged(each, swap) for key, each in value.items()} if value else value
    return value
