"""Modules and weights that a clone still shares with its original, because they lie where no clone is led.

A clone has clones of the modules below it, also inside lists, dicts, partials and closures (`standins.clone`). What an
object of the user's holds, or a closure or method of somebody else, it would use as it is; and two threads would add
up gradients in one leaf.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from pipeloom.errors import SplitError
from pipeloom.standins.clone import Clones
from pipeloom.standins.followed import OF_EVERY_MODULE, PLAIN
from pipeloom.standins.memoised import content

_DEPTH = 4
_PLAIN = (type(None), *PLAIN)
_MOST_ITEMS = 1000
_OF_OTHERS = frozenset({"torch", "numpy", *sys.stdlib_module_names})


def refuse_hidden(clones: Clones) -> None:
    """Raise if a clone leads to an original.

    Raises:
        SplitError: one does.
    """
    originals = {id(each): name for name, each in clones.originals.items()}
    weights = {
        id(p): f"{n}.{k}" for n, m in clones.originals.items() for k, p in m._parameters.items() if p is not None
    }
    own, originals = {id(each) for each in clones.of.values()}, {**originals, **weights}
    for name, clone in clones.of.items():
        for key, value in vars(clone).items():
            if key not in OF_EVERY_MODULE and not isinstance(value, _PLAIN):
                for found in _held(value, originals, set(own), _DEPTH):
                    raise SplitError(
                        f"{name!r} has {found!r} in its attribute {key!r}, inside of a {type(value).__name__}; the "
                        "schedule runs two replicas of the model, and both would use that one",
                        "keep modules and weights in attributes of modules, or in lists and dicts of modules",
                    )


def _held(value: Any, originals: Mapping[int, str], seen: set[int], depth: int) -> Iterator[str]:
    if id(value) in originals:
        yield originals[id(value)]
    elif depth and id(value) not in seen:
        seen.add(id(value))
        for inner in _inside(value):
            yield from _held(inner, originals, seen, depth - 1)


def _inside(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _MOST_ITEMS else ()
    if isinstance(value, list | tuple | set):
        return list(value) if len(value) <= _MOST_ITEMS else ()
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.FunctionType):
        cells, keywords = value.__closure__ or (), value.__kwdefaults__ or {}
        return (*map(content, cells), *(value.__defaults__ or ()), *keywords.values())
    if isinstance(value, nn.Module):  # of no tree: clones are known
        return [*value.parameters(), *value.modules(), *(each for m in value.modules() for each in _attributes(m))]
    is_own = type(value).__module__.partition(".")[0] not in _OF_OTHERS and not isinstance(value, type)
    return list(vars(value).values()) if is_own and hasattr(value, "__dict__") else ()


def _attributes(module: nn.Module) -> list[Any]:
    return [value for key, value in vars(module).items() if key not in OF_EVERY_MODULE]
