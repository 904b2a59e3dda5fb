"""Modules without anything to train run as if nobody looked at torch functions.

`nn.TransformerEncoder` and its parts take a fused path where nothing requires a gradient, but not while a mode is on,
and the two paths round differently. In a frozen module there is nothing to split; so the mode is off inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_CALLED_INSTEAD = "_compiled_call_impl"
"""Where `nn.Module.compile` puts what is called instead of the module's own code (see `standins.clone`)."""

Concerns = Callable[[Any, Any], bool]
"""``concerns(args, kwargs)``: whether a call is given weights, and has to be seen whoever is called."""


def frozen_in(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that have parameters, none of which is trained; also those inside, which may be called directly.

    Left out are torch's own layers without layers inside, which ask nobody, and what is in a module that was compiled,
    or whose forward was replaced: a compiler would find its calls changed each time.
    """
    parameters = list(module.parameters())
    is_frozen = bool(parameters) and not any(each.requires_grad for each in parameters)
    inner = () if _is_compiled(module) else tuple(each for child in module.children() for each in frozen_in(child))
    is_plain = type(module).__module__.startswith("torch.nn.") and not module._modules
    return (module, *inner) if is_frozen and not is_plain else inner


def _is_compiled(module: nn.Module) -> bool:
    return not {"forward", _CALLED_INSTEAD}.isdisjoint(vars(module))


@contextmanager
def looking_away(modules: Iterable[nn.Module], mode: TorchFunctionMode, concerns: Concerns) -> Iterator[None]:
    """Let calls of some modules run without the mode, now; hooks of theirs too.

    Args:
        modules: the frozen ones.
        mode: that is on around their calls.
        concerns: whether it stays on for a call.
    """
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(answered(module, partial(_call, mode, concerns)))
        yield


def _call(mode: TorchFunctionMode, concerns: Concerns, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if mode not in _stack() or concerns(args, kwargs):
        return call(*args, **kwargs)
    above = []
    while (top := torch._C._pop_torch_function_stack()) is not mode:
        above.append(top)
    try:
        _push(reversed(above))
        return call(*args, **kwargs)
    finally:
        for _ in above:
            torch._C._pop_torch_function_stack()
        _push((mode, *reversed(above)))


def _stack() -> list[Any]:
    return [torch._C._get_function_stack_at(level) for level in range(torch._C._len_torch_function_stack())]


def _push(modes: Iterable[Any]) -> None:
    for each in modes:
        torch._C._push_on_torch_function_stack(each)


@contextmanager
def answered(module: nn.Module, answer: Callable[..., Any]) -> Iterator[None]:
    """Let calls of a module go to ``answer(call, *args, **kwargs)``, only now: a recompute in the backward does not."""
    inner: dict[str, Any] = vars(module)
    had_one, before = _CALLED_INSTEAD in inner, inner.get(_CALLED_INSTEAD)
    inner[_CALLED_INSTEAD] = partial(answer, before or module._call_impl)
    try:
        yield
    finally:
        if had_one:
            inner[_CALLED_INSTEAD] = before
        else:
            del inner[_CALLED_INSTEAD]
