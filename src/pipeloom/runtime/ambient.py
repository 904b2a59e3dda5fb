"""What the caller of a step has switched on, switched on again in the thread of each rank.

Most of torch's switches belong to the thread that flipped them. A thread of our own would run in float32 inside the
caller's autocast, would record a graph inside ``no_grad``, and a `FlopCounterMode` around the step would count nothing.
So the caller's thread is read once per step, and every rank's thread becomes like it.

Per thread in torch 2.13, and carried: grad and inference mode, multithreaded backward, autocast, default device, stacks
of function and dispatch modes, hooks on saved tensors, number of intra-op threads (of a thread that computed before),
flushing of denormals (likewise), context variables. Of the process, so nothing to do: default dtype, determinism,
anomaly detection, matmul precision, the choice of attention kernels.

Not carried: the current CUDA device and stream, which belong to the rank; `torch.profiler`, which sees other threads
only if it is made with ``profile_all_threads=True``; transforms of `torch.func` around a step.

A mode and the functions of saved-tensor hooks are *shared* by the ranks, which run at the same time: as a mode does
under multithreaded backward, they must bear it. `FlopCounterMode` does in its total; its rows per module mix.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

Reentry = Callable[[], AbstractContextManager[Any]]
"""Partials of functions: to decorate one for each step takes longer than all that is read."""

_DEVICE_TYPES = ("cpu", "cuda")
_OFF = contextlib.nullcontext()
# Before pytorch #165068 a weight cast under no_grad stays in the cache without its graph, and its gradient is lost
# without a word. 2.13 is the oldest version on which that was seen to be mended; drop this with support for 2.12.
_IS_CACHE_SOUND = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


@dataclass(frozen=True)
class Autocast:
    """The caller's autocast of one device type; enabled or not."""

    device_type: str
    dtype: torch.dtype
    is_enabled: bool
    is_cache_enabled: bool

    @classmethod
    def capture(cls, device_type: str) -> Autocast:
        """Read it from the calling thread."""
        return cls(
            device_type,
            dtype=torch.get_autocast_dtype(device_type),
            is_enabled=torch.is_autocast_enabled(device_type),
            is_cache_enabled=torch.is_autocast_cache_enabled() and _IS_CACHE_SOUND,
        )

    def entered(self, is_enabled: bool) -> torch.autocast:
        """Its dtype and cache, switched on or off."""
        return torch.autocast(self.device_type, self.dtype, is_enabled, self.is_cache_enabled)


@dataclass(frozen=True)
class Ambient:
    """The state of the thread that calls a step.

    Args:
        autocasts: per device type.
        reentries: each makes a context that switches one thing on, in a thread of a rank.
    """

    autocasts: tuple[Autocast, ...]
    reentries: tuple[Reentry, ...]

    @classmethod
    def capture(cls, device_types: Iterable[str] = _DEVICE_TYPES) -> Ambient:
        """Read the calling thread.

        Args:
            device_types: the devices that stages are on, whose autocast matters; as ``torch.device.type``.
        """
        available = filter(_has_autocast, device_types)
        reentries = (capture() for capture in _CAPTURES)
        return cls(tuple(map(Autocast.capture, available)), tuple(filter(None, reentries)))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make the running thread like the caller's until the block ends, however it ends.

        Autocast stays *off*: backward must run without it. `autocast` switches it on, around forwards.
        """
        with contextlib.ExitStack() as stack:
            if self.has_autocast:
                stack.enter_context(_CAST_CACHE.held())
            for autocast in self.autocasts:
                stack.enter_context(autocast.entered(is_enabled=False))
            for reentry in self.reentries:
                stack.enter_context(reentry())
            yield

    def entered_here(self) -> AbstractContextManager[None]:
        """The same in the very thread that was read, which is like the caller's already: all but autocast."""
        return replace(self, reentries=()).entered() if self.has_autocast else _OFF

    def autocast(self) -> AbstractContextManager[Any]:
        """The caller's autocast, for one forward action inside `entered`; nothing at all if it is off."""
        return self._every_autocast() if self.has_autocast else _OFF

    def without_cast_cache(self) -> Ambient:
        """The same, but every use of a weight casts it: where weights change within a call, casts would be stale."""
        return replace(self, autocasts=tuple(replace(each, is_cache_enabled=False) for each in self.autocasts))

    @cached_property
    def has_autocast(self) -> bool:
        """Whether the caller has switched autocast on, for any device."""
        return any(autocast.is_enabled for autocast in self.autocasts)

    @contextlib.contextmanager
    def _every_autocast(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for autocast in self.autocasts:
                if autocast.is_enabled:
                    stack.enter_context(autocast.entered(is_enabled=True))
            yield


class _CastCache:
    """Keeps autocast's cache of cast weights from being cleared under a rank that is using it.

    The cache belongs to the *process*, while the nesting count whose end clears it belongs to the thread [seen on
    2.13]. So the end of one rank's forward would clear the casts of all the others, in the middle of theirs: a weight
    that is used twice would be cast twice or once, its gradients summed in float32 or in bfloat16, by chance. Here
    the last rank that ends its step clears it. Until then a weight has one cast: the bits are those of one cast per
    micro-batch, since weights don't change within a step and each micro-batch goes back through it by itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_holders = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no autocast of this thread is outermost, so none clears; the last holder to leave does."""
        with self._lock:
            self._num_holders += 1
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()
            with self._lock:
                self._num_holders -= 1
                if self._num_holders == 0:
                    torch.clear_autocast_cache()


_CAST_CACHE = _CastCache()


def carried() -> Reentry:
    """What makes a thread of the user's like this one, a rank's: for a half of a pair that runs there."""
    ambient = Ambient.capture()

    @contextlib.contextmanager
    def reentry() -> Iterator[None]:
        with _CAST_CACHE.held(), ambient.entered():
            yield

    return reentry


@cache
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def _autograd() -> Reentry:
    is_inference, is_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    return partial(_with_autograd, is_inference, is_grad, torch._C._is_multithreading_enabled())


@contextlib.contextmanager
def _with_autograd(is_inference: bool, is_grad: bool, is_multithreaded: bool) -> Iterator[None]:
    # Inference mode first: entering it sets the grad mode.
    with (
        torch.inference_mode(is_inference),
        torch.set_grad_enabled(is_grad),
        torch.autograd.set_multithreading_enabled(is_multithreaded),
    ):
        yield


def _saved_tensors() -> Reentry | None:
    """Only the innermost pair of hooks acts in torch, so only that one is carried."""
    reason = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if reason is not None:
        return lambda: torch.autograd.graph.disable_saved_tensors_hooks(reason)
    hooks = _top_hooks()
    if hooks is None:
        return None
    return lambda: _OFF if _top_hooks() == hooks else torch.autograd.graph.saved_tensors_hooks(*hooks)


def _top_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def _function_modes() -> Reentry | None:
    """The default device is one of these: `torch.set_default_device` puts a mode at the bottom of the stack.

    Modes are pushed, not entered: ``__enter__`` may be for once only, and registers hooks that are there already.
    """
    modes = _function_stack()
    return partial(_with_function_modes, modes) if modes else None


@contextlib.contextmanager
def _with_function_modes(modes: list[Any]) -> Iterator[None]:
    before = _function_stack()
    try:
        for mode in _absent(modes, before):
            torch._C._push_on_torch_function_stack(mode)
        yield
    finally:
        while torch._C._len_torch_function_stack() > len(before):
            torch._C._pop_torch_function_stack()


def _function_stack() -> list[Any]:
    return [torch._C._get_function_stack_at(level) for level in range(torch._C._len_torch_function_stack())]


def _dispatch_modes() -> Reentry | None:
    modes = dispatch._get_current_dispatch_mode_stack()
    return partial(_with_dispatch_modes, modes) if modes else None


@contextlib.contextmanager
def _with_dispatch_modes(modes: list[Any]) -> Iterator[None]:
    pushed = []
    try:
        for mode in _absent(modes, dispatch._get_current_dispatch_mode_stack()):
            dispatch._push_mode(mode)
            pushed.append(mode)
        yield
    finally:
        for mode in reversed(pushed):
            # torch's own modes (fake tensors, functionalisation) have a place each, beside the stack.
            dispatch._pop_mode(getattr(mode, "_mode_key", None))


def _absent(modes: list[Any], present: list[Any]) -> list[Any]:
    """Those that are not on the stack: all, unless the step runs in the thread that called it."""
    return [mode for mode in modes if not any(mode is each for each in present)]


def _arithmetic() -> Reentry:
    """Sums differ in bits with the number of threads; products of small numbers with the flushing of denormals."""
    return partial(_with_arithmetic, torch.get_num_threads(), _is_flushing_denormals())


@contextlib.contextmanager
def _with_arithmetic(num_threads: int, is_flushing: bool) -> Iterator[None]:
    if torch.get_num_threads() != num_threads:
        # Not set back: that would set it for the process, and the caller's value is the one that counts.
        torch.set_num_threads(num_threads)
    was_flushing = _is_flushing_denormals()
    if was_flushing != is_flushing:
        torch.set_flush_denormal(is_flushing)
    try:
        yield
    finally:
        if was_flushing != is_flushing:
            torch.set_flush_denormal(was_flushing)


def _is_flushing_denormals() -> bool:
    """torch can set the processor's flag, not read it; half the smallest normal number is zero where it is set."""
    return sys.float_info.min / 2 == 0.0


def _context_variables() -> Reentry:
    return partial(_with_variables, tuple(contextvars.copy_context().items()))


@contextlib.contextmanager
def _with_variables(values: tuple[tuple[contextvars.ContextVar[Any], Any], ...]) -> Iterator[None]:
    here = contextvars.copy_context()
    changed = [(variable, value) for variable, value in values if here.get(variable, _OFF) is not value]
    tokens = [(variable, variable.set(value)) for variable, value in changed]
    try:
        yield
    finally:
        for variable, token in reversed(tokens):
            variable.reset(token)


# Modes last: a function mode would see, and could answer, the switching of what comes after it.
_CAPTURES: tuple[Callable[[], Reentry | None], ...] = (
    _context_variables,
    _arithmetic,
    _autograd,
    _saved_tensors,
    _function_modes,
    _dispatch_modes,
)
