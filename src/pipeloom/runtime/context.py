"""What the ranks of one step share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeloom.batch.losses import StepLoss
from pipeloom.batch.microbatches import MicrobatchInputs
from pipeloom.batch.trees import flatten
from pipeloom.ir import Kind
from pipeloom.runtime.ambient import Ambient
from pipeloom.runtime.crossing import Plan, StageFlow
from pipeloom.runtime.draw_key import DrawKey
from pipeloom.runtime.draws import drawing
from pipeloom.runtime.executor import Handler
from pipeloom.runtime.foreign_draws import ForeignDraws

Around = Callable[[Mapping[Kind, Handler]], dict[Kind, Handler]]
"""What the handlers of a rank become when something is put around them."""


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
        batch: all that ``inputs`` were cut from.
        plans: per micro-batch what crosses cuts, in a model that was cut by running it.
        outputs: per micro-batch the last stage's output, detached, as they come.
        input_grads: per micro-batch the gradients of the leaves of its model inputs, as they come.
        around: what a rank's handlers become where weights change within a call; None where they do not.
    """

    inputs: list[MicrobatchInputs]
    loss: StepLoss | None
    ambient: Ambient
    seed: int
    step_index: int
    foreign: ForeignDraws
    has_outputs: bool
    batch: Any = None
    plans: list[Plan] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)
    input_grads: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)
    around: Around | None = None

    def draw_key(self, microbatch: int, unit: str) -> DrawKey:
        """Where the random numbers of a unit come from: never from who runs it (contract 3)."""
        return DrawKey(self.seed, self.step_index, 0, microbatch, unit)

    def draws(self, microbatch: int) -> Callable[[str, int], AbstractContextManager[None]]:
        """What is put around one call of a unit."""

        def draws(unit: str, call: int = 0) -> AbstractContextManager[None]:
            return drawing(self.draw_key(microbatch, unit), call, self.foreign)

        return draws

    def flow(self, microbatch: int, stage: int) -> StageFlow:
        """What crosses the cuts around a stage."""
        return self.plans[microbatch].stage(stage)

    def backward_into_inputs(self, scale: float) -> None:
        """Back-propagate into the graph that inputs brought along, from ``scale`` times what their stage found.

        Once for the whole batch, because micro-batches share that graph; on the caller's thread, to which it belongs.
        """
        pairs = [
            (leaf, grad.to(leaf.device).mul(scale))
            for microbatch in sorted(self.input_grads)
            if any(grad is not None for grad in self.input_grads[microbatch])
            for leaf, grad in zip(self._leaves(microbatch), self.input_grads[microbatch], strict=True)
            if grad is not None
        ]
        if pairs:
            with self.ambient.entered():
                torch.autograd.backward([leaf for leaf, _ in pairs], [grad for _, grad in pairs])

    def _leaves(self, microbatch: int) -> list[Any]:
        inputs = self.inputs[microbatch]
        return flatten((inputs.args, inputs.kwargs))[0]
