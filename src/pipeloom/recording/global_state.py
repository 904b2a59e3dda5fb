"""Globals in which a model's code keeps tensors of a micro-batch.

The code around units runs on every stage, and stages run at the same time, each with another micro-batch. What such
code leaves in a global (of the files that the model's classes come from: a variable, an entry of a list or dict, an
attribute of a class), another stage may have written over when it is read. Attributes of the model are each stage's.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from pipeloom.batch.copies import Alias
from pipeloom.errors import UncuttableCode
from pipeloom.recording.ops import Kind, Op
from pipeloom.standins.clone import Clones
from pipeloom.standins.glue import tensors_in
from pipeloom.standins.placeholder import Placeholder

_CONTAINERS = (list, dict, set)
_MOST_ITEMS = 1000
_ABSENT = object()
_Held = tuple[str, Any, dict[Any, Any]]
"""How it is named, what it is, and what is in it before."""


class Globals:
    """What is in such globals around a dry run: the tensors of it that are left there are taken out after it.

    They have no numbers, or are of other inputs. Others stay: another thread may have put them there.

    Args:
        clones: of the dry run.
        is_of_batch: whether a tensor depends on a batch, and was made where every stage makes it.
    """

    def __init__(self, clones: Clones, is_of_batch: Callable[[Tensor], bool]) -> None:
        self._clones, self._is_of_batch = clones, is_of_batch
        self._held: list[_Held] = []
        self._made: dict[int, weakref.ref[Tensor]] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put this around the dry run.

        Raises:
            UncuttableCode: code around units left a tensor of the batch.
        """
        self._held = list(_held(self._clones))
        try:
            yield
        except BaseException:
            self._put_back()
            raise
        refused = self._put_back()
        if refused is not None:
            raise UncuttableCode(
                f"the code around the model's units keeps a tensor of the batch in a global, {refused}; every stage "
                "runs that code, at the same time, each with another micro-batch, and would write over what another "
                "one reads",
                "keep it in an attribute of the module whose code it is (self.x = ...), which each stage has of its "
                "own, or pass it as an argument",
            )

    @contextmanager
    def of_unit(self, ops: Sequence[Op], is_made_up: bool) -> Iterator[None]:
        """Put this around a unit: what it leaves is no value that code around units could have from there.

        Only the stage of the unit runs its code, so nobody writes over what is left there but the unit itself; another
        unit that reads it is bound to this one. So a stand-in takes its place, which is known by its maker.

        Args:
            ops: of the recording; the unit's is the last one then.
            is_made_up: whether the unit ran on numbers that were made up.
        """
        before = [_tensors(value) for _, value, _ in self._held]
        yield
        if ops[-1].kind is Kind.EVERYWHERE:
            return
        for (_, value, _), then in zip(self._held, before, strict=True):
            were = set(map(id, then.values()))
            for key, now in _tensors(value).items():
                if id(now) not in were and (
                    self._is_of_batch(now) or (is_made_up and not isinstance(now, Placeholder))
                ):
                    _put(value, key, _stand_in(now))

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function of a run that records nothing else: what it makes is not another thread's."""
        out = func(*args, **kwargs)
        self._made.update({id(each): weakref.ref(each) for each in tensors_in(out, [])})
        return out

    def _is_made(self, tensor: Tensor) -> bool:
        found = self._made.get(id(tensor))
        return isinstance(tensor, Placeholder) or (found is not None and found() is tensor)

    def _put_back(self) -> str | None:
        """The name of one that is refused, if there is one."""
        found = None
        for name, value, before in self._held:
            for key, now in reversed(_tensors(value).items()):
                if before.get(key) is not now and (self._is_of_batch(now) or self._is_made(now)):
                    found = name.format(key) if self._is_of_batch(now) else found
                    _put(value, key, before.get(key, _ABSENT))
        return found


def _stand_in(tensor: Tensor) -> Tensor:
    made: Tensor = Alias.apply(tensor if isinstance(tensor, Placeholder) else Placeholder.like(tensor))  # type: ignore[no-untyped-call]
    return made


def _held(clones: Clones) -> Iterator[_Held]:
    for file in dict.fromkeys(type(each).__module__ for each in clones.originals.values()):
        if file in sys.modules and not file.startswith("torch."):
            variables = vars(sys.modules[file])
            yield f"{{}} of {file}", variables, _entries(variables)
            for key, value in _entries(variables).items():
                if _is_kept(value, file):
                    yield f"{key} of {file}", value, _entries(value)


def _tensors(held: Any) -> dict[Any, Tensor]:
    return {key: each for key, each in _entries(held).items() if isinstance(each, Tensor)}


def _is_kept(value: Any, file: str) -> bool:
    if isinstance(value, _CONTAINERS):
        return len(value) <= _MOST_ITEMS
    return getattr(value, "__module__", None) == file and (isinstance(value, type) or hasattr(value, "__dict__"))


def _entries(held: Any) -> dict[Any, Any]:
    """A copy made at one go: another thread may be writing."""
    if isinstance(held, list):
        return dict(enumerate(list.copy(held)))
    if isinstance(held, set):
        return {each: each for each in set.copy(held)}
    inner = held if isinstance(held, dict) else vars(held)
    return dict.copy(inner) if isinstance(inner, dict) else inner.copy()


def _put(held: Any, key: Any, value: Any) -> None:
    """Put another value in the place of an entry, or none; later ones of a list come first."""
    with suppress(KeyError, IndexError, AttributeError):  # another thread was faster
        if isinstance(held, set):
            held.discard(key)
            if value is not _ABSENT:
                held.add(value)
        elif isinstance(held, list | dict):
            if value is _ABSENT:
                del held[key]
            else:
                held[key] = value
        elif value is _ABSENT:
            delattr(held, key)
        else:
            setattr(held, key, value)
