"""The switch that ends a step on all ranks."""

from __future__ import annotations

from pipeloom.ir import Action


class Control:
    """Shared by the ranks of one step; also knows what each rank was last seen doing.

    Attributes:
        is_stopped: every rank is to end before its next action.
        last_seen: per rank, the action that it came to last.
    """

    def __init__(self, num_ranks: int) -> None:
        self.is_stopped = False
        self.last_seen: list[Action | None] = [None] * num_ranks

    def stop(self) -> None:
        """Let every rank end before its next action."""
        self.is_stopped = True
