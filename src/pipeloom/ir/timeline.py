"""When each action of a schedule ran: predicted by the simulator or measured by the executor, the same type."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from pipeloom.ir.action import Action
from pipeloom.ir.peaks import peak_held_to_input_grad, peak_held_to_weight_grad
from pipeloom.ir.schedule import Schedule
from pipeloom.ir.versions import peak_versions_held


@dataclass(frozen=True, slots=True)
class Span:
    """One action with its start and end.

    Args:
        rank: who did it.
        action: what was done.
        start_s: seconds from the start of the timeline.
        end_s: likewise.
    """

    rank: int
    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, eq=False)
class Timeline:
    """A schedule with the start and end of each of its actions.

    Args:
        schedule: what ran.
        starts: per rank, the start of each action of its program, in seconds.
        ends: per rank, the ends.
        peak_activation_bytes: per rank, the most bytes of activations held; None where nobody knows.
    """

    schedule: Schedule
    starts: tuple[array[float], ...]
    ends: tuple[array[float], ...]
    peak_activation_bytes: tuple[int, ...] | None = None

    def spans(self, rank: int) -> tuple[Span, ...]:
        """What ``rank`` did, in the order of its program."""
        rows = zip(self.schedule.program(rank), self.starts[rank], self.ends[rank], strict=True)
        return tuple(Span(rank, action, start_s, end_s) for action, start_s, end_s in rows)

    def __iter__(self) -> Iterator[Span]:
        for rank in range(self.schedule.num_ranks):
            yield from self.spans(rank)

    def __repr__(self) -> str:
        """Figures for a notebook: the fields have every action twice."""
        figures = f"makespan_s={self.makespan_s:.4g}, bubble_fraction={self.bubble_fraction:.4g}"
        return f"Timeline({self.schedule.name!r}, num_ranks={self.schedule.num_ranks}, {figures})"

    @property
    def start_s(self) -> float:
        """Start of the first computation; transfers may have been posted before it."""
        return min((start for start, _ in self._windows()), default=0.0)

    @property
    def makespan_s(self) -> float:
        """End of the last computation minus start of the first."""
        return max((end for _, end in self._windows()), default=0.0) - self.start_s

    @property
    def longest_rank_span_s(self) -> float:
        """The longest, over ranks, of (its last end − its first start).

        It is the period of a step when nothing synchronises the ranks between steps: the "cost" of the
        zero-bubble papers (Qi et al., ICLR 2024, section 5).
        """
        return max((end - start for start, end in self._windows()), default=0.0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Per rank, the seconds in which it computes."""
        return tuple(self._busy_s(rank) for rank in range(self.schedule.num_ranks))

    @property
    def bubble_fraction(self) -> float:
        """Idle time ÷ (number of ranks × makespan): (S−1)/(M+S−1) for GPipe with equal stages."""
        return self._idle_fraction(self.makespan_s)

    @property
    def bubble_fraction_unsynchronised(self) -> float:
        """The same over the longest rank span: the "bubble rate" of the zero-bubble papers."""
        return self._idle_fraction(self.longest_rank_span_s)

    @property
    def peak_held_to_input_grad(self) -> tuple[int, ...]:
        """Per rank, the most micro-batches held between F and I (or B)."""
        return peak_held_to_input_grad(self.schedule)

    @property
    def peak_held_to_weight_grad(self) -> tuple[int, ...]:
        """Per rank, the most micro-batches held between F and W (or B)."""
        return peak_held_to_weight_grad(self.schedule)

    @property
    def peak_versions_held(self) -> tuple[int, ...]:
        """Per rank, the most versions of its stages' weights held at once."""
        return peak_versions_held(self.schedule)

    def _idle_fraction(self, length_s: float) -> float:
        if length_s == 0:
            return 0.0
        # Rounding may leave a rank that never idles a hair above its length.
        return max(0.0, 1 - sum(self.busy_s) / (self.schedule.num_ranks * length_s))

    def _busy_s(self, rank: int) -> float:
        rows = zip(self.schedule.program(rank), self.starts[rank], self.ends[rank], strict=True)
        if not self.schedule.overlaps:
            return sum(end - start for action, start, end in rows if action.kind.is_compute)
        busy_s, last_s = 0.0, -math.inf  # what two of a pair share counts once
        for start, end in sorted((start, end) for action, start, end in rows if action.kind.is_compute):
            busy_s += max(0.0, end - max(start, last_s))
            last_s = max(last_s, end)
        return busy_s

    def _windows(self) -> list[tuple[float, float]]:
        """Per rank that computes at all, its first start and last end."""
        windows = []
        for rank, program in enumerate(self.schedule.programs):
            busy = [i for i, action in enumerate(program) if action.kind.is_compute]
            if busy:  # the second of a pair may start first, or end last
                starts, ends = self.starts[rank], self.ends[rank]
                windows.append((min(starts[i] for i in busy[:2]), max(ends[i] for i in busy[-2:])))
        return windows
