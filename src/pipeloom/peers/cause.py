"""What went wrong, as all ranks say it."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass
from typing import Literal

from pipeloom.errors import PipeloomError


@dataclass(frozen=True)
class Cause:
    """What went wrong, where.

    Args:
        rank: who it happened to.
        kind: it raised, its process is gone, it keeps the others waiting, or it has ended in good order too early.
        place: "stage 1, micro-batch 3, action 1F3" or "outside a step, after step 12".
        message: one or more lines: type and text.
        traceback: of the user's exception, as text; "" if there is none.
    """

    rank: int
    kind: Literal["exception", "lost", "stalled", "ended"]
    place: str
    message: str
    traceback: str = ""

    @property
    def line(self) -> str:
        """Who, where and what: the last line that every rank prints."""
        return f"rank {self.rank}, {self.place}: {self.message}"

    @classmethod
    def of(cls, rank: int, place: str, error: BaseException) -> Cause:
        """The cause that an exception is. Its notes (PEP 678) and its hint are part of the traceback alone."""
        kind, text = type(error), error.message if isinstance(error, PipeloomError) else str(error)
        is_plain = kind.__module__ in ("builtins", "__main__")
        name = kind.__qualname__ if is_plain else f"{kind.__module__}.{kind.__qualname__}"
        message = f"{name}: {text}" if text else name
        return cls(rank, "exception", place, message, "".join(traceback.format_exception(error)))

    def __str__(self) -> str:
        return f"{self.traceback.rstrip()}\n{self.line}" if self.traceback else self.line


@dataclass(frozen=True)
class Claim:
    """That something is the cause.

    Args:
        cause: what went wrong.
        teller: the rank that says so.
        epoch: how many calls the teller had begun.
        last_call: the last one that all ranks make together, as a collective counts them, which it was through.
        is_dying: whether the process of whoever sends this ends because of it.
    """

    cause: Cause
    teller: int
    epoch: int
    last_call: tuple[int, int] = (-1, -1)
    is_dying: bool = False

    @property
    def order(self) -> tuple[bool, int, int]:
        """Of claims made at the same time the least holds: a death that nothing explains explains the rest, and what
        all ranks notice, each in its own words, the lowest tells.
        """
        is_lost = self.cause.kind == "lost"
        return not is_lost, self.cause.rank if is_lost else 0, self.teller

    def encode(self) -> bytes:
        """JSON for the wire."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: memoryview) -> Claim:
        """Read `encode`'s JSON."""
        said = json.loads(bytes(body))
        return cls(**{**said, "cause": Cause(**said["cause"]), "last_call": tuple(said["last_call"])})
