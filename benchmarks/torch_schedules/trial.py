"""What one set of processes runs: a schedule that both have, on stages that wait."""

from __future__ import annotations

from dataclasses import dataclass

import pipeloom as pl
from pipeloom.ir import Schedule
from pipeloom.testing import virtual_costs

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Our names, and torch's classes: the same actions in the same order."""


@dataclass(frozen=True)
class Trial:
    """One schedule of one size; travels to the processes as JSON.

    Attributes:
        schedule: a key of `CLASSES`.
        forward_s: seconds of F, of I and of W; B takes twice as long.
        num_rounds: how often each of the two has its turn.
        num_steps: timed steps in a turn, after one that is not.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    forward_s: float
    num_rounds: int
    num_steps: int

    @property
    def times_s(self) -> tuple[float, float, float]:
        """Of F, B, and of W as a part of B."""
        return self.forward_s, 2 * self.forward_s, self.forward_s

    @property
    def made(self) -> Schedule:
        """Ours."""
        return pl.schedule(self.schedule, num_ranks=self.num_ranks, num_microbatches=self.num_microbatches)

    @property
    def simulated_s(self) -> float:
        """The makespan; torch's too, which does the I of the first stage only in its W, where nobody waits for it."""
        made = self.made
        return float(pl.simulate(made, virtual_costs(made.num_stages, *self.times_s)).makespan_s)
