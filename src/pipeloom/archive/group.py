"""Processes that work together: on a pipeline, on a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol


class Group(Protocol):
    """What is asked of them: a number each, and a way to hear all at once."""

    @property
    def rank(self) -> int:
        """This process, in ``range(num_ranks)``."""
        ...

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        ...

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        """Return every rank's payload, in the order of ranks; every rank calls it, from its main thread.

        Args:
            payload: this rank's.
            what: what the call is about, for reports; the same on all ranks.
        """
        ...


@dataclass(frozen=True)
class Alone:
    """One process that holds everything."""

    rank: int = 0
    num_ranks: int = 1

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:  # noqa: ARG002
        """Return its own payload."""
        return [payload]


ALONE = Alone()


def gather_json(group: Group, value: Any, what: str) -> list[Any]:
    """Return every rank's value; collective."""
    return [json.loads(payload) for payload in group.all_gather(json.dumps(value).encode(), what)]
