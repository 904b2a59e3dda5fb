"""The sequential oracle: what a pipeline's numbers are held against (contract 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.losses import LossFn, LossRule, Reduction, StepLoss
from pipeloom.batch.microbatches import MicrobatchInputs, split_batch
from pipeloom.runtime.ambient import Ambient
from pipeloom.runtime.draw_key import DrawKey
from pipeloom.runtime.draws import drawing, drawing_in_backward
from pipeloom.runtime.gradients import GradientScope
from pipeloom.runtime.stage import Stage
from pipeloom.splitting import Ties, split


def sequential_step(  # long: what each argument means, once each
    model: nn.Module | Sequence[nn.Module],
    *args: Any,
    num_microbatches: int,
    target: Any = None,
    loss_fn: LossFn | None = None,
    loss_reduction: Reduction = "mean",
    loss_count: Callable[[Any], Any] | None = None,
    loss_scale: float = 1.0,
    seed: int = 0,
    step_index: int = 0,
    order: Sequence[int] | None = None,
    num_stages: int | None = None,
    cuts: Sequence[int] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run a batch's micro-batches one after another on the whole model and add up their gradients.

    No stages, no boundaries, no recomputation: forward and backward of one micro-batch, then of the next. The
    random rule, the weights of the loss and the casts are those of `pipeloom.Pipeline.step`.

    Args:
        model: what the pipeline was made from; its ``.grad`` are added to.
        args: the model's inputs, tensors ``(batch, ...)``.
        num_microbatches: as the pipeline's.
        target: as the pipeline's.
        loss_fn: as the pipeline's.
        loss_reduction: as the pipeline's.
        loss_count: as the pipeline's.
        loss_scale: as the step's.
        seed: as the pipeline's.
        step_index: which step, counted from 0: the pipeline's ``step_index`` before its step.
        order: micro-batches in the order in which they are run; default ascending.
        num_stages: as the pipeline's; matters only for weights that stages share, whose gradients are summed per stage.
        cuts: likewise.
        kwargs: the model's keyword arguments.

    Returns:
        The loss of the batch, a detached scalar.
    """
    made = split(model, num_stages=num_stages, cuts=cuts)
    inputs = split_batch(args, kwargs, target, num_microbatches)
    rule = LossRule(loss_fn, loss_reduction, loss_count)
    loss = rule.for_step([each.num_samples for each in inputs], [each.target for each in inputs], loss_scale)
    ties = Ties(made, loss_fn)
    try:
        oracle = _Oracle(Stage(0, made.units), inputs, loss, Ambient.capture(), seed, step_index)
        scope = GradientScope([*oracle.whole.module.parameters(), *rule.parameters])
        # On a thread of its own, as a rank is: the caller's autocast must not be around the backward.
        with ThreadPoolExecutor(1) as executor:
            executor.submit(oracle.run, order or range(num_microbatches), scope).result()
        ties.gather(range(made.num_stages))
    finally:
        ties.undo()
    return loss.total()


@dataclass(frozen=True)
class _Oracle:
    """One step of a whole model, micro-batch after micro-batch."""

    whole: Stage
    inputs: Sequence[MicrobatchInputs]
    loss: StepLoss
    ambient: Ambient
    seed: int
    step_index: int

    def run(self, order: Sequence[int], scope: GradientScope) -> None:
        with self.ambient.entered():
            for microbatch in order:
                scalar = self.forward(microbatch)
                if self.loss.is_deferred:
                    scope.set_apart()
                with drawing_in_backward(self.key(microbatch, "backward")):
                    torch.autograd.backward(scalar, torch.full_like(scalar, self.loss.seed(microbatch)))
            scope.finish(self.loss.final_scale if self.loss.is_deferred else 1.0)

    def forward(self, microbatch: int) -> Tensor:
        inputs = self.inputs[microbatch]
        keys = [self.key(microbatch, unit.name) for unit in self.whole.units]
        with self.ambient.autocast():
            output = self.whole((inputs.args, inputs.kwargs), keys)
            with drawing(self.key(microbatch, "loss_fn")):
                return self.loss.compute(microbatch, output, inputs.target)

    def key(self, microbatch: int, unit: str) -> DrawKey:
        return DrawKey(self.seed, self.step_index, 0, microbatch, unit)
