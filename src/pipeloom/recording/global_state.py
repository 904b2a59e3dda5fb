"""Globals in which a model's code keeps tensors of a micro-batch.

The code around units runs on every stage, and stages run at the same time, each with another micro-batch. What such
code leaves in a global (of the files that the model's classes come from: a variable, an entry of a list or dict, an
attribute of a class), another stage may have written over when it is read. Attributes of the model are each stage's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pipeloom.errors import UncuttableCode
from pipeloom.standins.clone import Clones

_CONTAINERS = (list, dict, set)
_MOST_ITEMS = 1000
_ABSENT = object()
_Held = tuple[str, Any, dict[Any, Any]]
"""How it is named, what it is, and what is in it before."""


@contextmanager
def without_globals(clones: Clones, is_of_batch: Callable[[Tensor], bool]) -> Iterator[None]:
    """Put this around a dry run: what tensors it leaves are taken out, being without numbers, or of other inputs.

    Args:
        clones: of the dry run.
        is_of_batch: whether a tensor depends on a batch, and was made where every stage makes it.

    Raises:
        UncuttableCode: it left such a tensor.
    """
    held = list(_held(clones))
    try:
        yield
    except BaseException:
        _put_back(held, is_of_batch)
        raise
    refused = _put_back(held, is_of_batch)
    if refused is not None:
        raise UncuttableCode(
            f"the code around the model's units keeps a tensor of the batch in a global, {refused}; every stage runs "
            "that code, at the same time, each with another micro-batch, and would write over what another one reads",
            "keep it in an attribute of the module whose code it is (self.x = ...), which each stage has of its own, "
            "or pass it as an argument",
        )


def _held(clones: Clones) -> Iterator[_Held]:
    for file in dict.fromkeys(type(each).__module__ for each in clones.originals.values()):
        if file in sys.modules and not file.startswith("torch."):
            variables = vars(sys.modules[file])
            yield f"{{}} of {file}", variables, dict(variables)
            for key, value in list(variables.items()):
                if _is_kept(value, file):
                    yield f"{key} of {file}", value, _entries(value)


def _put_back(held: Iterable[_Held], is_of_batch: Callable[[Tensor], bool]) -> str | None:
    """The name of one that is refused, if there is one."""
    found = None
    for name, value, before in held:
        for key, now in reversed(_entries(value).items()):
            if isinstance(now, Tensor) and before.get(key) is not now:
                found = name.format(key) if is_of_batch(now) else found
                _restore(value, key, before.get(key, _ABSENT))
    return found


def _is_kept(value: Any, file: str) -> bool:
    if isinstance(value, _CONTAINERS):
        return len(value) <= _MOST_ITEMS
    return getattr(value, "__module__", None) == file and (isinstance(value, type) or hasattr(value, "__dict__"))


def _entries(held: Any) -> dict[Any, Any]:
    if isinstance(held, list):
        return dict(enumerate(held))
    return (
        {each: each for each in held} if isinstance(held, set) else dict(held if isinstance(held, dict) else vars(held))
    )


def _restore(held: Any, key: Any, before: Any) -> None:
    """Put one entry back; later ones of a list come first."""
    if isinstance(held, set):
        held.discard(key)
    elif isinstance(held, list | dict):
        if before is _ABSENT:
            del held[key]
        else:
            held[key] = before
    elif before is _ABSENT:
        delattr(held, key)
    else:
        setattr(held, key, before)
