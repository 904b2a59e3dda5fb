"""Random draws are intercepted where they are dispatched, and nothing else is.

The obvious tool, a `TorchDispatchMode`, sees every operator of a unit and costs microseconds for each; so it would
have to be off in units that do not draw, and a unit that starts to draw later would be missed. What draws below it,
inside another mode, a tensor subclass or compiled code, it does not see.

Instead, kernels for the drawing operators alone are registered at `BackendSelect`, the last key before the backends:
every other operator passes at no cost, composite operators (`dropout`) are seen when they reach the draw
(`bernoulli_`), compiled code when it runs, and tracers, which come before, record what the user wrote. Outside
`entered` a draw passes unchanged, some microseconds later. The stream is in torch's thread-local state,
which autograd takes along to the threads that run a backward on GPUs.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.library import Library

from pipeloom.errors import DrawError

_KEY_NAME = "BackendSelect"
_BELOW = torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse(_KEY_NAME))
_STREAM = "pipeloom.draw_stream"
_CPU = torch.device("cpu")
# Where no operator needs the default generator: on the CPU they all reach one that takes a generator.
_WITHOUT_FORK = ("cpu", "meta")
_DRAW_LATER = ("CompositeImplicitAutograd", _KEY_NAME)
_fork_lock = threading.Lock()


class Stream(Protocol):
    """Where draws are answered from; see `draws.DrawStream`."""

    def generator_to_draw(self, device: torch.device) -> torch.Generator:
        """The generator for a draw on this device."""

    def check_given(self, generator: torch.Generator) -> None:
        """A draw named a generator that is not the default one: the stream's own, or the user's."""


def current_stream() -> Any:
    """The stream of this thread (or of the backward that autograd runs in it); None outside `entered`."""
    return torch._C._get_obj_in_tls(_STREAM) if torch._C._is_key_in_tls(_STREAM) else None


class entered:  # noqa: N801  (a context manager; a class, because every call of every unit enters one)
    """Answer this thread's draws from ``stream``, or from the default generators if it is None; contexts nest."""

    __slots__ = ("_outer", "_stream")

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._outer: Any = None

    def __enter__(self) -> None:
        self._outer = current_stream()
        _stash(self._stream)

    def __exit__(self, *_: object) -> None:
        _stash(self._outer)


def _stash(stream: Stream | None) -> None:
    if _STASH_STEALS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))
    torch._C._stash_obj_in_tls(_STREAM, stream)


def _stash_steals() -> bool:
    """torch 2.9 releases what was stashed without having taken a reference (2.13 takes one): found by trying.

    To be removed when the oldest torch of the range takes one.
    """
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_STREAM, probe)
    steals = sys.getrefcount(probe) == before
    for stolen in (probe, None) if steals else ():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stolen))
    torch._C._stash_obj_in_tls(_STREAM, None)
    return steals


def _find_drawing_overloads() -> tuple[OpOverload, ...]:
    """Every operator of torch that draws by itself.

    Composite ones reach another operator before they draw, and so do factories (``rand``), which have a kernel
    of torch's at this key.
    """
    overloads = (
        getattr(getattr(torch.ops.aten, packet), overload)
        for packet, _, overload in map(_split_name, torch._C._dispatch_get_all_op_names())
        if packet
    )
    return tuple(
        each
        for each in overloads
        if torch.Tag.nondeterministic_seeded in each.tags
        and not any(torch._C._dispatch_has_kernel_for_dispatch_key(each.name(), key) for key in _DRAW_LATER)
    )


def _split_name(name: str) -> tuple[str, str, str]:
    namespace, _, rest = name.partition("::")
    packet, dot, overload = rest.partition(".")
    return (packet if namespace == "aten" else "", dot, overload or "default")


def _register() -> Library:
    """Register everything; the library has to be kept, because its end undoes it."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for overload in DRAWING_OVERLOADS:
        has_generator = any(argument.name == "generator" for argument in overload._schema.arguments)
        kernel = (_generating if has_generator else _forking)(overload)
        library.impl(overload, kernel, _KEY_NAME, with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _generating(overload: OpOverload) -> Callable[..., Any]:
    """A kernel that gives the stream's generator to an operator that takes one."""

    def draw(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        stream = current_stream()
        device = _CPU if stream is None else device_of(args, kwargs)
        if stream is not None and device.type != "meta":
            given = kwargs.get("generator")
            if given is None or is_same_generator(given, _default_of(device)):
                kwargs["generator"] = stream.generator_to_draw(device)
            else:
                stream.check_given(given)
        return overload.redispatch(keyset & _BELOW, *args, **kwargs)

    return draw


def _forking(overload: OpOverload) -> Callable[..., Any]:
    """A kernel for an operator that draws from the default generator and takes no other: fused CUDA kernels."""
    chances = [position for position, each in enumerate(overload._schema.arguments) if each.name.startswith("dropout")]

    def draw(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        stream = current_stream()
        device = _CPU if stream is None else device_of(args, kwargs)
        has_chance = any(args[position] for position in chances if position < len(args)) or not chances
        if stream is None or device.type in _WITHOUT_FORK or not has_chance:
            return overload.redispatch(keyset & _BELOW, *args, **kwargs)
        # What the kernel draws by other operators goes on in the generator that was lent.
        with forked(_default_of(device), stream.generator_to_draw(device)), entered(None):
            return overload.redispatch(keyset & _BELOW, *args, **kwargs)

    return draw


@contextmanager
def forked(default: torch.Generator, own: torch.Generator) -> Iterator[None]:
    """Let what draws from ``default`` continue ``own``, one thread of the process at a time."""
    with _fork_lock:
        before = default.get_state()
        default.set_state(own.get_state())
        try:
            yield
            own.set_state(default.get_state())
        finally:
            default.set_state(before)


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where a call draws: where its first tensor is, which may be the one it writes into."""
    tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
    return next((tensor.device for tensor in tensors), _CPU)


def is_same_generator(one: Any, other: Any) -> bool:
    """torch makes a new Python object each time it hands a generator over; what it holds is the same."""
    return bool(one._cdata == other._cdata)


def _default_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device.type)
    if not hasattr(module, "default_generators"):
        raise DrawError(
            f"a unit drew on {device} by an operator that takes no generator; a device whose default generator "
            "can be lent to the unit is needed: CUDA or the CPU",
            "switch off dropout in fused attention and recurrent layers on this device.",
        )
    # A stand-in (see `draws`) gives the process's generator as `default`.
    found: Any = module.default_generators[device.index]
    default: torch.Generator = getattr(found, "default", found)
    return default


_STASH_STEALS = _stash_steals()
DRAWING_OVERLOADS = _find_drawing_overloads()
_LIBRARY = _register()
