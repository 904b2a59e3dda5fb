"""Calls that are one op of glue, whatever goes on inside: `torch.vmap`, `torch.func.grad`, functions of TorchScript.

What a transform hands to the function that it transforms are tensors of its own, which have neither memory nor a value
that could be sent; TorchScript calls no function of torch that a mode sees. What they use is found out while they run:
a transformed function finds tensors in its closure as well. Stand-ins take their places where torch looks for
them [the same in torch 2.9 and 2.13]; where nobody sees, they do what they did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._functorch import apis, eager_transforms
from torch.overrides import TorchFunctionMode

from pipeloom.standins.glue import METADATA, current, exchanged, tensors_in, unseen

_SCRIPTED: Any = torch._C.ScriptFunction
_call_scripted: Any = _SCRIPTED.__call__


def _scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
    return _call_scripted(function, *args, **kwargs)


_PLACES: tuple[tuple[Any, str], ...] = (
    (apis, "vmap_impl"),
    (eager_transforms, "grad_impl"),
    (eager_transforms, "grad_and_value_impl"),
    (_SCRIPTED, "__call__"),
)
_PLAIN = (*[getattr(where, name) for where, name in _PLACES[:3]], _scripted)
_TRANSFORMS = frozenset(_PLAIN[:3])


@cache
def stand_in() -> None:
    """Put the stand-ins in place."""
    for (where, name), plain in zip(_PLACES, _PLAIN, strict=True):
        setattr(where, name, _seen(plain))


def _seen(plain: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        mode = current()
        if mode is None:
            return plain(*args, **kwargs)
        with unseen(mode):
            return mode.see(plain, args, kwargs)

    return wraps(plain)(call)


def may_draw(func: Any, args: tuple[Any, ...], are_keyed: bool) -> bool:
    """Whether what a transform runs may draw random numbers: by torch, which `torch.vmap` has to be told, or else.

    Args:
        func: what is called.
        args: with what.
        are_keyed: whether draws by Python's ``random`` and numpy are allowed.
    """
    return func in _TRANSFORMS and (are_keyed or func is not _PLAIN[0] or args[3] != "error")


def used_by(func: Any, change: Callable[[Any], Any]) -> AbstractContextManager[list[Tensor]]:
    """Put this around a call of glue: the tensors from outside that a transformed function uses, once it has run.

    Args:
        func: what is called.
        change: what is done before with the arguments of each function that a transformed one calls.
    """
    if func is _PLAIN[-1]:
        return _unoptimised()
    return _noting(change) if func in _TRANSFORMS else nullcontext([])


def swapping(func: Any, swap: Callable[[Tensor], Tensor]) -> Any:
    """What to call on a stage: the variables of a transformed function may hold placeholders of what came there."""
    if func not in _TRANSFORMS:
        return func

    def called(*args: Any, **kwargs: Any) -> Any:
        with _Each(lambda given: exchanged(given, swap)):
            return func(*args, **kwargs)

    return called


@contextmanager
def _unoptimised() -> Iterator[list[Tensor]]:
    """TorchScript compiles kernels for what it is called with, and those have no shape function."""
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        yield []


@contextmanager
def _noting(change: Callable[[Any], Any]) -> Iterator[list[Tensor]]:
    used: list[Tensor] = []

    def note(given: Any) -> Any:
        given = change(given)
        used.extend(each for each in tensors_in(given, []) if not torch._C._functorch.is_functorch_wrapped_tensor(each))
        return given

    with _Each(note):
        yield used


class _Each(TorchFunctionMode):
    """Hands the arguments of each function to ``change``, but of those that ask for metadata."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in METADATA:
            return func(*args, **(kwargs or {}))
        args, kwargs = self._change((args, kwargs or {}))
        return func(*args, **kwargs)
