"""All ranks in one process, a thread each: messages are handed over without a copy.

A queue per channel and a poison message per channel to end a step: a rank that waits is woken at once, which a
condition with a time-out would not do, and a queue in C wakes sooner than a condition in Python does.
"""

from __future__ import annotations

from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any

from pipeloom.ir import Action, Schedule
from pipeloom.ir.relations import other_stage
from pipeloom.runtime.transport.base import Aborted

_Key = tuple[int, int, int]
"""Of a message: its micro-batch, the stage that sends it, and the one that receives it."""
_POISON: tuple[None, None] = (None, None)


class LocalTransport:
    """The channels of one step of one pipeline; every rank uses the same object.

    Args:
        schedule: a lowered schedule.
        channels: the pairs of ranks (sender, receiver) between which it sends.

    Attributes:
        peak_live_slots: per rank, the most receives that were posted and not yet taken.
    """

    def __init__(self, schedule: Schedule, channels: Iterable[tuple[int, int]]) -> None:
        self._rank_of = schedule.rank_of
        self._queues: dict[tuple[int, int], SimpleQueue[tuple[_Key | None, Any]]] = {
            channel: SimpleQueue() for channel in channels
        }
        self._arrived: list[dict[_Key, Any]] = [{} for _ in range(schedule.num_ranks)]
        self._num_live_slots = [0] * schedule.num_ranks
        self.peak_live_slots = [0] * schedule.num_ranks

    def send(self, action: Action, message: Any) -> None:
        """Post a message; never waits."""
        microbatch, stage, to = action.microbatch, action.stage, other_stage(action)
        channel = self._rank_of(stage, microbatch), self._rank_of(to, microbatch)
        self._queues[channel].put(((microbatch, stage, to), message))

    def post(self, action: Action) -> None:
        """Count a slot: live from here until the message is taken."""
        rank = self._rank_of(action.stage, action.microbatch)
        self._num_live_slots[rank] += 1
        self.peak_live_slots[rank] = max(self.peak_live_slots[rank], self._num_live_slots[rank])

    def take(self, action: Action) -> Any:
        """Wait for a message; those that come before it on its channel are kept for their own consumers.

        Raises:
            Aborted: the step ends before the message comes.
        """
        microbatch, stage, sending_stage = action.microbatch, action.stage, other_stage(action)
        rank = self._rank_of(stage, microbatch)
        queue, arrived = self._queues[self._rank_of(sending_stage, microbatch), rank], self._arrived[rank]
        awaited = microbatch, sending_stage, stage
        while awaited not in arrived:
            key, message = queue.get()
            if key is None:
                raise Aborted
            arrived[key] = message
            del message  # or a rank that goes on waiting would keep it
        self._num_live_slots[rank] -= 1
        return arrived.pop(awaited)

    def abort(self) -> None:
        """Wake every rank that waits, now or later."""
        for queue in self._queues.values():
            queue.put(_POISON)
