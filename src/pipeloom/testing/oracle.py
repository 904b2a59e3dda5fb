"""The sequential oracle: what a pipeline's numbers are held against (contract 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.runtime.ambient import Ambient
from pipeloom.runtime.draws import DrawKey, drawing, drawing_in_backward
from pipeloom.runtime.gradients import GradientScope
from pipeloom.runtime.losses import LossFn, LossRule, Reduction
from pipeloom.runtime.microbatches import split_batch
from pipeloom.runtime.stage import Stage
from pipeloom.splitting import Ties, split


def sequential_step(
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
    ties = Ties(made)
    whole = Stage(0, made.units, is_first=True)
    inputs = split_batch(args, kwargs, target, num_microbatches)
    targets = [each.target for each in inputs]
    rule = LossRule(loss_fn, loss_reduction, loss_count)
    loss = rule.for_step([each.num_samples for each in inputs], targets, loss_scale)
    ambient = Ambient.capture()

    def run() -> Tensor:
        scope = GradientScope([*whole.module.parameters(), *rule.parameters])
        with ambient.entered():
            for i in order or range(num_microbatches):
                one_microbatch(i)
                if loss.is_deferred:
                    scope.set_apart()
                run_backward(i)
            scope.finish(loss.final_scale if loss.is_deferred else 1.0)
            ties.gather()
        return loss.total()

    scalars: dict[int, Tensor] = {}

    def one_microbatch(i: int) -> None:
        keys = [DrawKey(seed, step_index, 0, i, unit.name) for unit in whole.units]
        with ambient.autocast():
            output = whole((inputs[i].args, inputs[i].kwargs), keys)
            with drawing(DrawKey(seed, step_index, 0, i, "loss_fn")):
                scalars[i] = loss.compute(i, output, targets[i])

    def run_backward(i: int) -> None:
        scalar = scalars.pop(i)
        with drawing_in_backward(DrawKey(seed, step_index, 0, i, "backward")):
            torch.autograd.backward(scalar, torch.full_like(scalar, loss.seed(i)))

    # On a thread of its own, as a rank is: the caller's autocast must not be around the backward.
    try:
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(run).result()
    finally:
        ties.undo()
