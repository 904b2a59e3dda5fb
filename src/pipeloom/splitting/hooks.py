"""Hooks on parents (contract 25): on a module that spans stages each fires once, as if the module were whole.

Every stage runs the parents' code, so a hook that stayed on a clone would fire on every stage, and see placeholders. A
pre-hook fires where the module's first unit is, a forward hook where its last one is. They may look; a hook that
changes values would have to be in the plan, and hooks on gradients need the module's inputs and outputs in one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from pipeloom.errors import UncuttableCode
from pipeloom.splitting.handed import is_alike
from pipeloom.standins.clone import HOOKS, is_of_a_library

_FORWARD, _BEFORE = "_forward_hooks", "_forward_pre_hooks"
_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")

Fire = Callable[[str, bool, Any, nn.Module, tuple[Any, ...]], Any]
"""``fire(name, is_before, hook, module, given)`` calls a hook of a module where it belongs, and returns what it did."""


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of the user's."""
    return any(not is_of_a_library(hook) for kind in HOOKS for hook in vars(module).get(kind, {}).values())


def refuse_backward_hooks(parents: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise for hooks on gradients of modules that are not whole in a stage.

    Raises:
        UncuttableCode: there is one.
    """
    for name, module in parents:
        own = [hook for kind in ("_backward_hooks", "_backward_pre_hooks") for hook in vars(module)[kind].values()]
        if any(not is_of_a_library(hook) for hook in own):
            raise UncuttableCode(
                f"{name or 'the model'} has a backward hook, which needs inputs and outputs in one graph, and is too "
                "large for one stage",
                "register it on the modules in it, or use fewer stages",
            )


def put_hooks(name: str, original: nn.Module, clone: nn.Module, fire: Fire, known: set[int]) -> None:
    """Give the clone of a parent the hooks that its module has now, beside those that a parent's code gave the clone.

    Args:
        name: of the module.
        original: the module.
        clone: of it.
        fire: calls a hook of the user's where it belongs.
        known: keys of the module's own hooks so far; gets those of now.
    """
    added = set[int]()
    for kind in (_FORWARD, _BEFORE):
        theirs, here = vars(original)[kind], clone.__dict__[kind]
        known.update(theirs)
        own = {
            key: hook
            for key, hook in here.items()
            if key not in known and not any(is_alike(hook, each) for each in theirs.values())
        }
        added.update(own)
        here.clear()
        for key, hook in theirs.items():
            here[key] = hook if is_of_a_library(hook) else _fired(fire, name, kind == _BEFORE, hook, original)
        here.update(own)
    for flags in _FLAGS:
        here = clone.__dict__[flags]
        kept = {key: flag for key, flag in here.items() if key in added}
        here.clear()
        here.update(vars(original)[flags] | kept)


def hooks_of(module: nn.Module) -> frozenset[int]:
    """The keys of a module's forward hooks of both kinds."""
    return frozenset(key for kind in (_FORWARD, _BEFORE) for key in vars(module).get(kind, ()))


def has_any_hooks(module: nn.Module) -> bool:
    """Whether it has a forward hook of either kind; asked at every call of every unit of another stage."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def fire_added(stand_in: nn.Module, known: frozenset[int], args: Any, kwargs: dict[str, Any], out: Any) -> None:
    """Call the hooks that a parent's code put on a unit of another stage: it may collect what the unit returns.

    What they change has been changed there already. Code that puts the same hook each time has one of them called.
    """
    for kind, flags, given in ((_BEFORE, _FLAGS[2], ()), (_FORWARD, _FLAGS[0], (out,))):
        done: list[Any] = []
        for key, hook in list(vars(stand_in)[kind].items()):
            is_new = key not in known and not is_of_a_library(hook) and not any(is_alike(hook, each) for each in done)
            if is_new:
                done.append(hook)
                hook(stand_in, args, *([kwargs] if key in vars(stand_in)[flags] else []), *given)


def _fired(fire: Fire, name: str, is_before: bool, hook: Any, original: nn.Module) -> Any:
    def hooked(_: nn.Module, *given: Any) -> Any:
        found = fire(name, is_before, hook, original, given)
        if found is not None and (name or is_before):
            raise UncuttableCode(
                f"a forward {'pre-' if is_before else ''}hook on {name or 'the model'} returned a value in the place "
                "of what it was given; several stages run that module, and only code of the model is in their plan",
                "register it on a module within that one stage runs, or let the model's forward do it",
            )
        return found

    return hooked
