"""When each action ran, written into arrays that are there before the step starts."""

from __future__ import annotations

import time
from array import array

from pipeloom.ir import Schedule, Timeline

clock = time.perf_counter


class Trace:
    """The starts and ends of one step's actions, by the clock of this process.

    Args:
        schedule: what will run.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._starts = [array("d", bytes(8 * len(program))) for program in schedule.programs]
        self._ends = [array("d", bytes(8 * len(program))) for program in schedule.programs]

    def spans(self, rank: int) -> tuple[array[float], array[float]]:
        """The starts and ends of one rank, by position in its program, for that rank's thread to fill in."""
        return self._starts[rank], self._ends[rank]

    def of(self, rank: int) -> tuple[bytes, bytes]:
        """The starts and ends of one rank, for `put` in another process."""
        return self._starts[rank].tobytes(), self._ends[rank].tobytes()

    def put(self, rank: int, starts: bytes, ends: bytes) -> None:
        """Take over what another process measured; processes of one machine share the clock."""
        self._starts[rank], self._ends[rank] = array("d", starts), array("d", ends)

    def timeline(self) -> Timeline:
        """What was measured, counted from the earliest start."""
        zero = min((start for starts in self._starts for start in starts), default=0.0)
        return Timeline(
            self._schedule,
            tuple(array("d", (start - zero for start in starts)) for starts in self._starts),
            tuple(array("d", (end - zero for end in ends)) for ends in self._ends),
        )
