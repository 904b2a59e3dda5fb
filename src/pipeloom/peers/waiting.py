"""Waiting for what other ranks send, up to a limit that counts only time in which this process could run."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_SLICE_S = 0.5
LOOK_S = 5.0


class Overdue(Exception):
    """The limit is over and nothing came."""


class Patience:
    """What is left of a limit, over the waits for one thing.

    A limit by the clock would be over the moment a stopped process (SIGSTOP, a suspended laptop) runs again, with all
    that it waits for unread in its sockets. So a wait is made of short ones, and each counts for no more than it was
    asked to take.

    Args:
        limit_s: how much of it there is.
        look: called every 5 s of waiting, to see whether there is any hope; it may raise.
    """

    def __init__(self, limit_s: float, look: Callable[[], None] | None = None) -> None:
        self._left_s = limit_s
        self._look = look
        self._until_look_s = LOOK_S

    def spend(self, wait: Callable[[float], bool]) -> None:
        """Call ``wait(at most so many seconds)`` once; it says whether something happened.

        Raises:
            Overdue: nothing did, and nothing is left.
        """
        asked_s = max(min(self._left_s, _SLICE_S), 0.0)
        start_s = time.monotonic()
        if wait(asked_s):
            self._count(start_s, asked_s)
        else:
            if self._left_s <= 0:
                raise Overdue
            self._count(start_s, asked_s)
            self._look_sometimes()

    def take(self, queue: SimpleQueue[T]) -> T:
        """Wait for an item. Ctrl-C interrupts it.

        Raises:
            Overdue: nothing came within what is left.
        """
        while True:
            asked_s = max(min(self._left_s, _SLICE_S), 0.0)
            start_s = time.monotonic()
            try:
                return queue.get(timeout=asked_s)
            except Empty:
                if self._left_s <= 0:
                    raise Overdue from None
            finally:
                self._count(start_s, asked_s)
            self._look_sometimes()

    def _count(self, start_s: float, asked_s: float) -> None:
        spent_s = min(time.monotonic() - start_s, asked_s)
        self._left_s -= spent_s
        self._until_look_s -= spent_s

    def _look_sometimes(self) -> None:
        if self._look is not None and self._until_look_s <= 0:
            self._look()
            self._until_look_s = LOOK_S
