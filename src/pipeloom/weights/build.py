"""A model without parameters, with everything else.

Under ``torch.device("meta")`` a model loses its buffers with its parameters, and a loader that fills in "whatever the
file has" leaves those that no file has (rotary frequencies, masks) as they were: noise. So the factory is run under
`Unmade`, each parameter gives its memory back when a module takes it, and what could not be kept is refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from pipeloom.errors import SplitError
from pipeloom.weights.become import become, on_meta
from pipeloom.weights.ledger import Ledger, State
from pipeloom.weights.unmade import Home, Unmade

_NUM_NAMED = 5


def build(factory: Callable[[], nn.Module]) -> nn.Module:
    """Call ``factory`` such that parameters are on the meta device and cost nothing, not even while they are made.

    Buffers, and other tensors that modules hold, are on the CPU with their values. A persistent buffer of random
    numbers or of uninitialised memory is on meta too: weights are expected to have it. Tied parameters are one object,
    dtypes, flags and attributes are as the factory makes them; random generators are not advanced.

    Raises:
        SplitError: ``factory`` returns no module, or one that existed before; a parameter has no shape yet (lazy
            modules); a tensor that no weights would have is random, or has lost its values; the factory reads values
            that are not there.
    """
    unmade = Unmade()
    try:
        with (
            _bared_at_registration(unmade),
            _valued(unmade.ledger) as valued,
            torch.device("cpu"),
            Home(unmade),
            unmade,
        ):
            model = factory()
    except Exception as error:
        error.add_note("(while the model was made without its parameters, which are read from the weights)")
        raise
    if not isinstance(model, nn.Module):
        raise SplitError(f"the factory returned a {type(model).__name__}; an nn.Module is needed")
    _strip_parameters(model, unmade.ledger)
    _check_parameters(model)
    unmade.ledger.settle_all()
    _check_lost(model, unmade.ledger, valued)
    _strip_buffers(model, unmade.ledger)
    _check_attributes(model, unmade.ledger)
    held = unmade.ledger.drawn()
    if held:
        raise _random([f"{form} outside of all modules" for form in held])
    return model


@contextmanager
def _bared_at_registration(unmade: Unmade) -> Iterator[None]:
    """Take a parameter's memory as soon as a module has it: a model is larger than its largest parameter."""
    thread = threading.get_ident()  # hooks are the process's, and another thread may make a real model
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def bare(_module: nn.Module, _name: str, parameter: Any) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta or is_lazy(parameter):
            return None
        if id(parameter) not in replaced:
            with unmade.paused():
                made = on_meta(parameter)
                if become(parameter, made):
                    return None
            replaced[id(parameter)] = parameter, made
        return replaced[id(parameter)][1]

    hook = register_module_parameter_registration_hook(bare)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _valued(ledger: Ledger) -> Iterator[WeakKeyDictionary[nn.Module, set[str]]]:
    """The names of each module's buffers that had values once, when they were registered or when others took over."""
    thread = threading.get_ident()
    found: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()

    def note(module: nn.Module, name: str, buffer: Tensor | None) -> None:
        tensors = (buffer, module._buffers.get(name)) if threading.get_ident() == thread else ()
        if any(each is not None and each.numel() and ledger.state(each) is None for each in tensors):
            found.setdefault(module, set()).add(name)

    hook = register_module_buffer_registration_hook(note)
    try:
        yield found
    finally:
        hook.remove()


def _check_lost(model: nn.Module, ledger: Ledger, valued: Mapping[nn.Module, set[str]]) -> None:
    """Refuse values that no weights have and that the factory has thrown away; a cache never had any."""
    lost = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in sorted(valued.get(module, set()) & module._non_persistent_buffers_set)
        if (buffer := module._buffers.get(name)) is not None and ledger.state(buffer) is State.UNWRITTEN
    ]
    if lost:
        raise SplitError(
            f"the factory left buffers that had values and lost them to uninitialised memory: {_listed(lost)}; they "
            "are not saved, so no weights would have them (to_empty() does so, and Hugging Face's from_pretrained())",
            "let the factory make the model and nothing else, as AutoModelForCausalLM.from_config(config) does; what "
            "weights= names is read into it",
        )


def _strip_parameters(model: nn.Module, ledger: Ledger) -> None:
    """Take the memory of parameters that came past the registration (``to_empty``) and were never written."""
    stripped: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta and not is_lazy(parameter) and ledger.state(parameter):
                module._parameters[name] = stripped.setdefault(id(parameter), on_meta(parameter))


def _check_parameters(model: nn.Module) -> None:
    named = [*model.named_parameters()]
    lazy = [name for name, parameter in named if is_lazy(parameter)]
    if lazy:
        raise SplitError(
            f"parameters have no shape before the model has run: {_listed(lazy)}",
            "give the sizes instead of Lazy modules",
        )
    real = [name for name, parameter in named if not parameter.is_meta]
    if real:
        raise SplitError(
            f"the factory returned parameters that existed before: {_listed(real)}; it has to make the model itself, "
            f"or all of it would be in memory",
            "make the model inside the factory, or give the model itself",
        )


def _strip_buffers(model: nn.Module, ledger: Ledger) -> None:
    """Leave only known values in buffers; weights have the others, if they are saved at all."""
    lost = []
    stripped: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            state = None if buffer is None else ledger.state(buffer)
            if buffer is None or state not in (State.UNWRITTEN, State.DRAWN):
                continue
            if name not in module._non_persistent_buffers_set:
                if not buffer.is_meta:
                    bare = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device="meta")
                    module._buffers[name] = stripped.setdefault(id(buffer), bare)
            elif state is State.DRAWN:
                lost.append(f"{prefix}.{name}".lstrip("."))
    if lost:
        raise _random(lost)


def _check_attributes(model: nn.Module, ledger: Ledger) -> None:
    # A hook before the forward makes such an attribute of parameters, anew each time (torch's older weight_norm).
    lost = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if not module._forward_pre_hooks
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules") and isinstance(value, Tensor | list | tuple | dict)
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and ledger.state(leaf) is State.DRAWN
    ]
    if lost:
        raise _random(lost)


def _random(names: list[str]) -> SplitError:
    return SplitError(
        f"tensors of random numbers, or computed of parameters, that no weights would have: {_listed(names)}",
        "register them as persistent buffers, which are saved, or make them in forward",
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more
