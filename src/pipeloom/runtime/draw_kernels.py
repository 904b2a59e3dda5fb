"""Random draws are intercepted where they are dispatched, and nothing else is.

The obvious tool, a `TorchDispatchMode`, sees every operator of a unit and costs microseconds for each; so it would
have to be off in units that do not draw, and a unit that starts to draw later would be missed. It also hides compiled
code from `torch.compile`.

Instead, kernels for the drawing operators alone are registered at a dispatch key that no tensor has, and a thread
inside `entered` adds that key to its calls: every other operator falls through in C++ at no cost, composite operators
(`dropout`) are seen when they reach the draw (`bernoulli_`), and compiled code when it runs. Both the key and the
stream are in torch's thread-local state, which autograd takes along to the threads that run a backward on GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.library import Library, fallthrough_kernel

# Above autograd, and unused but by torch's own C++ tests.
_KEY_NAME = "TESTING_ONLY_GenericMode"
_KEY = torch._C._dispatch_key_parse(_KEY_NAME)
_BELOW = torch._C._dispatch_keyset_full_after(_KEY)
_STREAM = "pipeloom.draw_stream"
_TRACERS = tuple(torch._C._TorchDispatchModeKey.__members__.values())
_CPU = torch.device("cpu")
# Devices whose tensors hold nothing, and the CPU, where an operator without a generator draws by one that has it.
_WITHOUT_FORK = ("cpu", "meta")
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


@contextmanager
def entered(stream: Stream) -> Iterator[None]:
    """Answer this thread's draws from ``stream``."""
    outer = current_stream()
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(outer)


def _set_stream(stream: Stream | None) -> None:
    torch._C._stash_obj_in_tls(_STREAM, stream)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, stream is not None)


def drawing_overloads() -> list[OpOverload]:
    """Every operator of torch that draws by itself: composite ones reach another operator before they draw."""
    overloads = (
        getattr(getattr(torch.ops.aten, packet), overload)
        for packet, _, overload in map(_split_name, torch._C._dispatch_get_all_op_names())
        if packet
    )
    return [
        each
        for each in overloads
        if torch.Tag.nondeterministic_seeded in each.tags
        and not torch._C._dispatch_has_kernel_for_dispatch_key(each.name(), "CompositeImplicitAutograd")
    ]


def _split_name(name: str) -> tuple[str, str, str]:
    namespace, _, rest = name.partition("::")
    packet, dot, overload = rest.partition(".")
    return (packet if namespace == "aten" else "", dot, overload or "default")


def with_generator(overload: OpOverload) -> OpOverload | None:
    """The operator itself if it takes a generator, or its sibling that does; None if there is none."""
    names = _argument_names(overload)
    if "generator" in names:
        return overload
    packet = overload.overloadpacket
    siblings = (getattr(packet, name) for name in packet.overloads())
    return next((each for each in siblings if _argument_names(each) == names | {"generator"}), None)


def _argument_names(overload: OpOverload) -> set[str]:
    arguments = ((argument.name, argument.type) for argument in overload._schema.arguments)
    return {name if name == "generator" else f"{name}: {kind}" for name, kind in arguments}


def _register() -> list[Library]:
    """Register everything; the libraries have to be kept, because their end undoes it."""
    # torch leaves these untyped.
    library: Any = Library
    everywhere, aten = library("_", "IMPL"), library("aten", "IMPL")
    everywhere.fallback(fallthrough_kernel, _KEY_NAME)
    for overload in drawing_overloads():
        target = with_generator(overload)
        kernel = _forking(overload) if target is None else _generating(overload, target)
        aten.impl(overload, kernel, _KEY_NAME, with_keyset=True)
    return [everywhere, aten]


def _generating(overload: OpOverload, target: OpOverload) -> Callable[..., Any]:
    """A kernel that calls ``target`` with the stream's generator."""

    def draw(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        stream = None if _is_traced() else current_stream()
        device = _CPU if stream is None else device_of(args, kwargs)
        if stream is None or device.type == "meta":
            return overload.redispatch(keyset & _BELOW, *args, **kwargs)
        given = kwargs.get("generator")
        if given is None or is_same_generator(given, _default_of(device)):
            kwargs["generator"] = stream.generator_to_draw(device)
        else:
            stream.check_given(given)
        return target.redispatch(keyset & _BELOW, *args, **kwargs)

    return draw


def _forking(overload: OpOverload) -> Callable[..., Any]:
    """A kernel for an operator that draws from the default generator and takes no other: fused CUDA kernels."""
    chances = [position for position, each in enumerate(overload._schema.arguments) if each.name.startswith("dropout")]

    def draw(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        stream = None if _is_traced() else current_stream()
        device = _CPU if stream is None else device_of(args, kwargs)
        has_chance = any(args[position] for position in chances if position < len(args)) or not chances
        if stream is None or device.type in _WITHOUT_FORK or not has_chance:
            return overload.redispatch(keyset & _BELOW, *args, **kwargs)
        with forked(_default_of(device), stream.generator_to_draw(device)):
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
    """Where a call draws: ``device=``, or where its first tensor is, or the CPU."""
    device = kwargs.get("device")
    if device is not None:
        return _indexed(torch.device(device))
    tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
    return next((tensor.device for tensor in tensors), _CPU)


def _indexed(device: torch.device) -> torch.device:
    """``cuda`` means the current one; a stream knows only numbered devices."""
    if device.index is not None or device.type in _WITHOUT_FORK:
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


def is_same_generator(one: Any, other: Any) -> bool:
    """torch makes a new Python object each time it hands a generator over; what it holds is the same."""
    return bool(one._cdata == other._cdata)


def _default_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    # A stand-in (see `draws`) gives the process's generator as `default`.
    found: Any = torch.get_device_module(device.type).default_generators[device.index]
    default: torch.Generator = getattr(found, "default", found)
    return default


def _is_traced() -> bool:
    """A tracer of torch.compile or torch.export records this draw: a generator in its graph would be wrong."""
    return any(torch._C._get_dispatch_mode(tracer) is not None for tracer in _TRACERS)


_LIBRARIES = _register()
