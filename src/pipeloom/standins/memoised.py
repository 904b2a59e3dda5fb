"""Functions that `functools.lru_cache` answers from the second call on, in the code of parents.

Whether a call is answered depends on all calls before it, of every stage's thread and of whoever else uses the
function; and what it answers with may belong to another micro-batch's graph. So where the code of a parent calls one,
it is as if there was no cache. Everybody else, the insides of units too, has the cache as ever.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch
from torch import nn

from pipeloom.standins.glue import current

MEMOISED: Any = type(functools.lru_cache(lambda: None))
"""The type of what `functools.lru_cache` makes."""
_OTHERS = frozenset({"torch", "torchvision", "numpy", "pipeloom", *sys.stdlib_module_names})
_DEPTH = 3
_MARK = "_pipeloom_plain"
_looked_through: dict[str, int] = {}
"""Modules of Python, and how many names they had then."""


def is_memoised(value: Any) -> bool:
    """Whether it is such a function."""
    return isinstance(value, MEMOISED) or (isinstance(value, types.FunctionType) and _MARK in vars(value))


def see_through(root: nn.Module) -> None:
    """Let a model's code do without caches of functions where it is a parent's: in its classes, modules and closures.

    Args:
        root: the model.
    """
    for kind in dict.fromkeys(each for module in root.modules() for each in type(module).__mro__):
        if not _is_of_others(kind.__module__):
            for key, value in list(vars(kind).items()):
                made = _seen_through(value)
                if made is not None:
                    setattr(kind, key, made)
            _look_through(kind.__module__, _DEPTH)


def _look_through(name: str, depth: int) -> None:
    """A module of Python, and those whose functions and classes it has."""
    module = sys.modules.get(name)
    if module is None or _looked_through.get(name) == len(vars(module)):
        return
    named = vars(module)
    _looked_through[name] = len(named)
    further: set[str] = set()
    for key, value in list(named.items()):
        made = _seen_through(value)
        if made is not None:
            named[key] = made
        elif depth and isinstance(value, types.FunctionType | types.ModuleType | type):
            further.add(value.__name__ if isinstance(value, types.ModuleType) else str(value.__module__))
    for each in further:
        if not _is_of_others(each):
            _look_through(each, depth - 1)


def _is_of_others(module: str) -> bool:
    return module.partition(".")[0] in _OTHERS and module != "__main__"


def _seen_through(value: Any) -> Any:
    """What to put in the place of a function; None if it has no cache, or leads to one that was changed within it."""
    if isinstance(value, staticmethod | classmethod):
        made = _seen_through(value.__func__)
        return None if made is None else type(value)(made)
    if isinstance(value, MEMOISED):
        return transparent(value)
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            inner = content(cell)
            if isinstance(inner, MEMOISED):
                cell.cell_contents = transparent(inner)
    return None


def transparent(memoised: Any) -> Any:
    """The function, and without its cache in a parent's code."""
    plain = memoised.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        is_seen = torch._C._len_torch_function_stack() and current() is not None
        return (plain if is_seen else memoised)(*args, **kwargs)

    functools.update_wrapper(call, memoised)
    for key in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(call, key, getattr(memoised, key))
    vars(call).update({"__wrapped__": plain, _MARK: True})
    return call


def content(cell: types.CellType) -> Any:
    """What a closure's variable holds; None if nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
