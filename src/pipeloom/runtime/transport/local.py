"""All ranks in one process, a thread each: messages are handed over without a copy.

A queue per channel and a poison message per channel to end a step: a rank that waits is woken at once, which a
condition with a time-out would not do, and a queue in C wakes sooner than a condition in Python does.
"""

from __future__ import annotations

from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any

from pipeloom.ir import Action, Schedule
from pipeloom.ir.relations import channel_of, counterpart
from pipeloom.runtime.transport.base import Aborted

_POISON: Any = (None, object())


class LocalTransport:
    """The channels of one step of one pipeline; every rank uses the same object.

    Args:
        schedule: a lowered schedule.
        channels: the pairs of ranks (sender, receiver) between which it sends.

    Attributes:
        peak_live_slots: per rank, the most receives that were posted and not yet taken.
    """

    def __init__(self, schedule: Schedule, channels: Iterable[tuple[int, int]]) -> None:
        self._schedule = schedule
        self._queues: dict[tuple[int, int], SimpleQueue[tuple[Action, Any]]] = {
            channel: SimpleQueue() for channel in channels
        }
        self._arrived: list[dict[Action, Any]] = [{} for _ in range(schedule.num_ranks)]
        self._num_live_slots = [0] * schedule.num_ranks
        self.peak_live_slots = [0] * schedule.num_ranks

    def send(self, action: Action, message: Any) -> None:
        """Post a message; never waits."""
        self._queues[channel_of(action, self._schedule)].put((counterpart(action), message))

    def post(self, action: Action) -> None:
        """Count a slot: live from here until the message is taken."""
        rank = self._schedule.rank_of(action.stage)
        self._num_live_slots[rank] += 1
        self.peak_live_slots[rank] = max(self.peak_live_slots[rank], self._num_live_slots[rank])

    def take(self, action: Action) -> Any:
        """Wait for a message; those that come before it on its channel are kept for their own consumers.

        Raises:
            Aborted: the step ends before the message comes.
        """
        rank = self._schedule.rank_of(action.stage)
        queue, arrived = self._queues[channel_of(counterpart(action), self._schedule)], self._arrived[rank]
        while action not in arrived:
            delivered = queue.get()
            if delivered is _POISON:
                raise Aborted
            receive, message = delivered
            arrived[receive] = message
        self._num_live_slots[rank] -= 1
        return arrived.pop(action)

    def abort(self) -> None:
        """Wake every rank that waits, now or later."""
        for queue in self._queues.values():
            queue.put(_POISON)
