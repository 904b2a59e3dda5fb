"""Python objects that several modules hold: a context, a list in which layers leave what a parent adds up.

Stages run at the same time, each with its own micro-batch, and would write over each other's values; so code that keeps
tensors, or numbers that change, in such an object is refused by name. And a dry run writes placeholders into it, which
the user must not find.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pipeloom.batch.trees import flatten
from pipeloom.errors import UncuttableCode
from pipeloom.recording.ops import Recording
from pipeloom.standins.clone import Clones
from pipeloom.standins.followed import Place
from pipeloom.standins.placeholder import NoNumbers

_CONTAINERS = (list, dict, set)
_NO_STATE = (nn.Module, Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def sharing(clones: Clones, units: Collection[str] | None, recording: Recording) -> Iterator[None]:
    """Objects that modules share are as before after a run; tensors of several stages may not be in them.

    Args:
        clones: of the dry run.
        units: whose calls it records; None where it records none.
        recording: gets the units that share an object.
    """
    shared = Shared(clones)
    try:
        yield
    except BaseException as error:
        written = shared.put_back()
        if isinstance(error, NoNumbers) and units is not None:
            shared.among(written, units)
        raise
    written = shared.put_back()
    if units is not None:
        recording.sharing = shared.among(written, units)


class Shared:
    """The objects that several modules of a model hold, as they are before a dry run.

    Args:
        clones: of the dry run.
    """

    def __init__(self, clones: Clones) -> None:
        self._clones = clones
        places: dict[int, list[Place]] = defaultdict(list)
        objects: dict[int, Any] = {}
        for name, module in clones.originals.items():
            for key, value in vars(module).items():
                if key not in _OF_EVERY_MODULE and _has_state(value):
                    places[id(value)].append((name, key))
                    objects[id(value)] = value
        self._held = [
            (objects[each], found, _contents(objects[each]))
            for each, found in places.items()
            if len({name for name, _ in found}) > 1
        ]

    def put_back(self) -> list[tuple[list[Place], Any]]:
        """Let the objects be as before; where they are held, and what was written into them."""
        written = []
        for value, places, before in self._held:
            now = [vars(self._clones.of[name]).get(key) for name, key in places] if _is_container(value) else [value]
            new = [leaf for each in now for leaf in _new(_contents(each), before)]
            if new:
                written.append((places, new))
            if not _is_container(value) and (new or vars(value).keys() != before.keys()):
                vars(value).clear()
                vars(value).update(before)
        return written

    @staticmethod
    def among(written: list[tuple[list[Place], Any]], units: Collection[str]) -> tuple[frozenset[str], ...]:
        """The units that hold an object together in which tensors were kept, for each such object.

        Raises:
            UncuttableCode: the code of parents, which every stage runs, holds one of them too.
        """
        found = []
        for places, new in written:
            owners = {_unit_of(name, units): (name, key) for name, key in places}
            if len(owners) > 1 and any(_is_value(leaf) for each in new for leaf in flatten(each)[0]):
                found.append(frozenset(owners))
                if all(owners):
                    continue
                (one, key), (other, _) = list(owners.values())[:2]
                raise UncuttableCode(
                    f"{_named(one)} and {_named(other)} share an object, {key!r}, and the model's code keeps values "
                    "in it; stages run at the same time, each with another micro-batch, and would mix them up",
                    "return them, pass them as arguments, or keep them in an attribute of the module that makes them",
                )
        return tuple(found)


def _has_state(value: Any) -> bool:
    return _is_container(value) or (hasattr(value, "__dict__") and not isinstance(value, _NO_STATE))


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS


def _contents(value: Any) -> dict[Any, Any]:
    if isinstance(value, list):
        return dict(enumerate(value))
    if isinstance(value, set):
        return {each: each for each in value}
    return dict(value) if isinstance(value, dict) else dict(vars(value))


def _new(now: dict[Any, Any], before: dict[Any, Any]) -> list[Any]:
    return [value for key, value in now.items() if key not in before or not is_same(before[key], value)]


def _is_value(leaf: Any) -> bool:
    """A tensor or a number; flags and names are settings, which libraries fill in at the first call."""
    return isinstance(leaf, Tensor) or type(leaf) in (int, float)


def is_same(one: Any, other: Any) -> bool:
    """The same object, or equal plain values of one type."""
    return one is other or (isinstance(one, int | float | str) and type(one) is type(other) and bool(one == other))


def _unit_of(name: str, units: Collection[str]) -> str:
    return next((unit for unit in units if name == unit or name.startswith(f"{unit}.")), "")


def _named(module: str) -> str:
    return f"module {module!r}" if module else "the model"
