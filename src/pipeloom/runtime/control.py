"""The switch that ends a step on all ranks."""

from __future__ import annotations

import threading

from pipeloom.ir import Action
from pipeloom.runtime.transport.base import Aborted


class Control:
    """Shared by the ranks of one step; also knows what each rank was last seen doing."""

    def __init__(self, num_ranks: int) -> None:
        self._is_stopped = threading.Event()
        self.last_seen: list[Action | None] = [None] * num_ranks

    def stop(self) -> None:
        """Let every rank end before its next action."""
        self._is_stopped.set()

    def check(self, rank: int, action: Action) -> None:
        """Note that ``rank`` comes to ``action``.

        Raises:
            Aborted: the step was stopped.
        """
        if self._is_stopped.is_set():
            raise Aborted
        self.last_seen[rank] = action
