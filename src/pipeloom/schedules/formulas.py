"""What the papers promise of a schedule, as functions: `pipeloom compare` prints them beside what is simulated.

Each is of a step with equal stages and no transfer time. Where a formula does not hold for a shape, it gives None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pipeloom.schedules.shape import Shape

Peaks = tuple[int, ...]


class Times(NamedTuple):
    """Seconds of one stage; all stages are equal."""

    forward_s: float = 1.0
    input_grad_s: float = 1.0
    weight_grad_s: float = 1.0

    @property
    def backward_s(self) -> float:
        """Of both halves."""
        return self.input_grad_s + self.weight_grad_s

    @property
    def step_s(self) -> float:
        """Of all that one micro-batch needs of one stage."""
        return self.forward_s + self.backward_s


class Formulas(NamedTuple):
    """Of one schedule; None where nothing is promised.

    Attributes:
        bubble_s: seconds that a rank idles in the makespan.
        unsynchronised_bubble_s: seconds that a rank idles in the longest rank span.
        peak_held_to_input_grad: per rank, micro-batches of stages held between F and I (or B) at most.
        peak_held_to_weight_grad: likewise until W.
        peak_versions_held: per rank, versions of weights held at most; None: as many as it holds stages.
    """

    bubble_s: Callable[[Shape, Times], float | None] | None = None
    unsynchronised_bubble_s: Callable[[Shape, Times], float | None] | None = None
    peak_held_to_input_grad: Callable[[Shape], Peaks | None] | None = None
    peak_held_to_weight_grad: Callable[[Shape], Peaks | None] | None = None
    peak_versions_held: Callable[[Shape], Peaks | None] | None = None
