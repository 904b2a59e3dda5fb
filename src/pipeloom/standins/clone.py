"""Shallow clones of a module tree: the same weights, but calls that can be answered by somebody else.

Every rank runs the parents' code at the same time, and that code may write ``self.x``. So each stage has parents of its
own; a deep copy would copy the weights as well. A clone has the attributes of its module, its own dicts of parameters,
buffers and children, and references to modules of the tree inside lists, dicts, methods and partials lead to clones.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from pipeloom.standins.followed import Attributes
from pipeloom.standins.memoised import MEMOISED, content, is_memoised
from pipeloom.standins.scripted import Scripted, is_scripted, modules_of

Call = Callable[..., Any]
Answer = Callable[[str, nn.Module, Call, tuple[Any, ...], dict[str, Any]], Any]
"""``answer(name, clone, run, args, kwargs)`` answers a call of a module; ``run(*args, **kwargs)`` runs its own code."""

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
HOOK_KINDS = (
    *HOOKS,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
"""Where a module has hooks of its forward and backward, and flags of them."""
_LEADING = (nn.Module, types.MethodType, types.FunctionType, functools.partial, MEMOISED)
_CONTAINERS = (list, tuple, set, dict, OrderedDict)
_TENSORS = ("_parameters", "_buffers")
_CALL = "_pipeloom_call"
COMPILED = "_compiled_call_impl"
"""Where `nn.Module.compile` puts what is called instead of the module's own code, before any hook: a way in that leaves
the class as it is, so that ``type(layer) is DecoderLayer`` still holds. In torch 2.9 and 2.13 alike."""


class Clones:
    """A clone of a module and of all modules below it.

    Args:
        root: what is cloned.
        answers: the modules whose calls are answered, by name; others run their own code.
        answer: answers these.

    Attributes:
        root: the clone.
        of: the clone of each module by its name; a module with several names has one clone.
    """

    def __init__(self, root: nn.Module, answers: Callable[[str, nn.Module], bool], answer: Answer) -> None:
        self._clones: dict[int, nn.Module] = {}
        self.of: dict[str, nn.Module] = {}
        self.originals: dict[str, nn.Module] = {}
        self._answered: list[str] = []
        self._leading: set[int] = set()
        self._containers: dict[int, tuple[Any, Any]] = {}
        for name, module in modules_of(root):
            is_answered = answers(name, module)
            kind: Any = Scripted if is_scripted(module) else type(module)
            has_own_call = is_answered and kind.__call__ is not nn.Module.__call__
            clone: nn.Module = object.__new__(_answered_class(kind) if has_own_call else kind)
            self._clones[id(module)] = self.of[name] = clone
            self.originals[name] = module
            if is_answered:
                self._answered.append(name)
        for name, clone in self.of.items():
            self._fill(self.originals[name], clone)
        for name in self._answered:
            call = functools.partial(_answer, answer, name, self.of[name])
            self.of[name].__dict__[_CALL if _CALL in vars(type(self.of[name])) else COMPILED] = call
        self.root = self.of[""]
        self._attributes = Attributes(self.originals)

    def follow(self) -> list[tuple[str, str]]:
        """Give clones the modes of their modules, plain values, and what else was changed since they last followed.

        Returns:
            The latter, by module and name.
        """
        for name, clone in self.of.items():
            clone.__dict__.update(plain_values(self.originals[name]))
        changed = self._attributes.changed()
        if changed:
            self.forget(changed)
        return changed

    def below(self, name: str) -> dict[str, nn.Module]:
        """The clones of a module and those below it, by their names within it."""
        return {n[len(name) :].lstrip("."): each for n, each in self.of.items() if f"{n}.".startswith(f"{name}.")}

    def forget(self, attributes: Iterable[tuple[str, str]]) -> None:
        """Let attributes, by module and name, be as in the model."""
        self._containers.clear()
        for name, key in attributes:
            if key == COMPILED:  # a way into the original, or to who answers for the clone
                continue
            original = vars(self.originals[name])
            self.of[name].__dict__.pop(key, None)
            if key in original:
                self.of[name].__dict__[key] = self._led(original[key])

    def _fill(self, module: nn.Module, clone: nn.Module) -> None:
        if isinstance(clone, Scripted):
            clone.__init__(module)  # type: ignore[misc]
            return
        inner = clone.__dict__
        kind: Any = type(module)
        for key, value in vars(module).items():
            if key not in _TENSORS:  # a container that is led is kept, and would keep weights that other processes have
                inner[key] = self._led(value)
        inner.update((key, types.MethodType(func, clone)) for key, func in _memoised(kind))
        inner["_parameters"] = dict(module._parameters)
        inner["_buffers"] = dict(module._buffers)
        inner["_modules"] = {key: self._clones.get(id(each), each) for key, each in module._modules.items()}
        inner[COMPILED] = None
        for hooks in HOOKS:
            inner[hooks] = OrderedDict(vars(module).get(hooks, {}))

    def _led(self, value: Any) -> Any:
        """A value in which references to modules of the tree lead to their clones; the same object if it has none."""
        if isinstance(value, nn.Module):
            return self._clones.get(id(value), value)
        if isinstance(value, types.MethodType) and id(value.__self__) in self._clones:
            return types.MethodType(value.__func__, self._clones[id(value.__self__)])
        if type(value) is functools.partial:
            return self._led_partial(value)
        if is_memoised(value):
            return self._led(value.__wrapped__)
        if type(value) is types.FunctionType:
            return self._led_function(value)
        if type(value) in _CONTAINERS:
            return self._led_items(value)
        return value

    def _led_items(self, value: Any) -> Any:
        """A container of the clones' own; one for all modules that share it."""
        if len(value) > 10_000:  # a table of numbers, not of modules
            return value
        if id(value) not in self._containers:
            items = value.items() if isinstance(value, dict) else value
            led = [(each[0], self._led(each[1])) for each in items] if items is not value else map(self._led, items)
            self._containers[id(value)] = (type(value)(led), value)
        return self._containers[id(value)][0]

    def _led_function(self, value: Any) -> Any:
        """A wrapper around a module's own forward, as libraries and users put in its place."""
        if id(value) in self._leading:
            return value
        self._leading.add(id(value))
        cells, keywords = value.__closure__ or (), value.__kwdefaults__ or {}
        found = [*map(content, cells), *(value.__defaults__ or ()), *keywords.values()]
        led = [self._led(each) if isinstance(each, _LEADING) else each for each in found]
        self._leading.discard(id(value))
        if all(new is old for new, old in zip(led, found, strict=True)):
            return value
        inner, given = led[: len(cells)], led[len(cells) : len(led) - len(keywords)]
        pairs = zip(inner, found, cells, strict=False)
        closure = tuple([cell if new is old else types.CellType(new) for new, old, cell in pairs])
        name, defaults = value.__name__, tuple(given) if value.__defaults__ else None
        made = types.FunctionType(value.__code__, value.__globals__, name, defaults, closure)
        made.__kwdefaults__ = dict(zip(keywords, led[len(led) - len(keywords) :], strict=True)) or None
        made.__dict__.update(vars(value))
        return made

    def _led_partial(self, value: Any) -> Any:
        func, args, keywords = self._led(value.func), self._led(value.args), self._led(value.keywords)
        is_same = func is value.func and all(a is b for a, b in zip(args, value.args, strict=True))
        if is_same and all(keywords[key] is each for key, each in value.keywords.items()):
            return value
        return functools.partial(func, *args, **keywords)


def plain_values(module: nn.Module) -> dict[str, Any]:
    """Its mode, and whatever else of its attributes is a plain value."""
    return {
        key: value
        for key, value in vars(module).items()
        if (value is None or isinstance(value, bool | int | float | str)) and key != COMPILED
    }


def _answer(answer: Answer, name: str, clone: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return answer(name, clone, functools.partial(own_call, clone), args, kwargs)


def own_call(clone: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run the code of a clone whose calls are answered, with its hooks."""
    if _CALL in vars(type(clone)):
        return type(clone).__mro__[1].__call__(clone, *args, **kwargs)
    return clone._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


@functools.cache
def _answered_class(kind: type) -> type:
    """A subclass whose calls go to an answer, for modules with a ``__call__`` of their own; its name is theirs."""

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_CALL](*args, **kwargs)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__, _CALL: None}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(names))


@functools.cache
def _memoised(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Methods that `functools.lru_cache` answers from the second call on, as they are without: all calls are alike."""
    named = {key: value for each in reversed(kind.__mro__) for key, value in vars(each).items()}
    return tuple([(key, value.__wrapped__) for key, value in named.items() if _is_memoised(value)])


def _is_memoised(value: Any) -> bool:
    """Also by a function around that (diffusers')."""
    cells = getattr(value, "__closure__", None) or () if hasattr(value, "__wrapped__") else ()
    return is_memoised(value) or any(is_memoised(content(cell)) for cell in cells)


def weights_of_modules(leaves: Iterable[Any]) -> list[Tensor]:
    """Those of modules among the arguments of a call: a decoder is handed the embedding."""
    return [weight for leaf in leaves if isinstance(leaf, nn.Module) for weight in leaf.parameters()]


def is_of_a_library(hook: Any) -> bool:
    """Hooks that make up the module, as those of weight norm; the user's own are not called for a dry run."""
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith(("torch.", "transformers."))
