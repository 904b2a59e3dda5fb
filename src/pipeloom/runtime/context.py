"""What the ranks of one step share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeloom.runtime.ambient import Ambient
from pipeloom.runtime.draws import DrawKey
from pipeloom.runtime.foreign_draws import ForeignDraws
from pipeloom.runtime.losses import StepLoss
from pipeloom.runtime.microbatches import MicrobatchInputs


@dataclass(frozen=True, slots=True)
class StepContext:
    """One call of the pipeline.

    Args:
        inputs: per micro-batch, what goes into the model and the loss.
        loss: the losses of a training step; None evaluates.
        ambient: the caller's thread state, entered again by every rank.
        seed: of all random draws.
        step_index: which step this is, counted from 0.
        foreign: refuses draws that no key can reach.
        has_outputs: whether the last stage's outputs are kept.
        outputs: per micro-batch the last stage's output, detached, as they come.
    """

    inputs: list[MicrobatchInputs]
    loss: StepLoss | None
    ambient: Ambient
    seed: int
    step_index: int
    foreign: ForeignDraws
    has_outputs: bool
    outputs: dict[int, Any] = field(default_factory=dict)

    def draw_key(self, microbatch: int, unit: str) -> DrawKey:
        """Where the random numbers of a unit come from: never from who runs it (contract 3)."""
        return DrawKey(self.seed, self.step_index, 0, microbatch, unit)
