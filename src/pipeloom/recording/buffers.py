"""Buffers of the code around units: which of them that code writes, and whose they are then."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from pipeloom.recording.prepare import is_written
from pipeloom.standins.followed import Place
from pipeloom.standins.placeholder import Placeholder, storage_of


class Buffers:
    """The buffers that a dry run's code finds in the modules around units.

    Args:
        found: each by module and name, with its version at the start.
        owned: those of one stage, because code writes values of that stage into them.

    Attributes:
        owned: those, and others that turned out to be such.
    """

    def __init__(self, found: Sequence[tuple[str, str, Tensor, int]], owned: Collection[Place]) -> None:
        self._found = found
        self.owned = frozenset(owned)

    def written(self) -> tuple[Place, ...]:
        """Those that the code has written, and those of one stage."""
        written = [(module, name) for module, name, buffer, version in self._found if is_written(buffer, version)]
        return (*written, *self.owned)

    def has_among(self, given: Sequence[Tensor], versions: Sequence[int]) -> bool:
        """Whether a call that was given these, in these versions, has written one: every stage then has to."""
        written = {storage_of(each) for each, old in zip(given, versions, strict=True) if is_written(each, old)}
        return any(storage_of(buffer) in written for _, _, buffer, _ in self._found) if written else False

    def note_owned(self, given: Sequence[Tensor], written: Collection[int]) -> None:
        """A small one that a value of a stage was written into is that stage's.

        Args:
            given: what the call was given.
            written: the memory that it wrote.
        """
        memory = {storage_of(each) for each in given if not isinstance(each, Placeholder)} & set(written)
        if memory:
            self.owned |= {(module, name) for module, name, buffer, _ in self._found if storage_of(buffer) in memory}
