"""The sequential oracle: what a pipeline's numbers are held against (contract 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.losses import LossFn, LossRule, Reduction, StepLoss
from pipeloom.batch.microbatches import MicrobatchInputs, split_batch
from pipeloom.batch.model_losses import ModelLoss
from pipeloom.errors import UnsupportedShape
from pipeloom.ir import Kind, Schedule
from pipeloom.ir.verify import require_valid
from pipeloom.runtime.ambient import Ambient
from pipeloom.runtime.draw_key import DrawKey
from pipeloom.runtime.draws import drawing, drawing_in_backward
from pipeloom.runtime.gradients import GradientScope
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.sums import OrderedSums
from pipeloom.splitting import Inputs, Split, Ties, split


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
    schedule: Schedule | None = None,
    num_stages: int | None = None,
    cuts: Sequence[int] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run a batch's micro-batches one after another on the whole model and add up their gradients.

    No stages, no boundaries, no recomputation: forward and backward of one micro-batch, then of the next. The
    random rule, the weights of the loss and the casts are those of `pipeloom.Pipeline.step`. Gradients add up in
    ascending order, or as a schedule has it: those of each stage in the order of its own program, and where the model
    has two replicas, those of each by themselves and then both. What comes before its turn is kept until then.

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
        schedule: the pipeline's (`pipeloom.Pipeline.schedule`), where it does not add up in ascending order.
        num_stages: as the pipeline's, or as the schedule has; matters for the schedule, and for weights that stages
            share, whose gradients are summed per stage.
        cuts: likewise.
        kwargs: the model's keyword arguments.

    Returns:
        The loss of the batch, a detached scalar.

    Raises:
        ScheduleError: the schedule is wrong, or not one of these stages and micro-batches that trains.
    """
    if schedule is not None and not isinstance(schedule, Schedule):
        raise UnsupportedShape(
            f"schedule={schedule!r} was given; a Schedule of a number of ranks and of micro-batches is needed",
            "pass the pipeline's own, pipe.schedule, or make one by pipeloom.schedule(name, ...)",
        )
    inputs = split_batch(args, kwargs, target, num_microbatches)
    if schedule is not None and num_stages is None and cuts is None:
        num_stages = schedule.num_stages
    made = split(model, num_stages=num_stages, cuts=cuts, inputs=(inputs[0].args, inputs[0].kwargs))
    _check_fits(schedule, made.num_stages, num_microbatches)
    rule = LossRule(loss_fn, loss_reduction, loss_count, ModelLoss.of(model))
    loss = rule.for_inputs(inputs, loss_scale)
    ties = Ties(made, loss_fn)
    try:
        ties.refresh(range(made.num_stages))  # a weight's hooks are those of its copies, as in the pipeline
        oracle = Oracle(made, inputs, loss, Ambient.capture(), seed, step_index)
        parameters = made.parameters(rule.parameters)
        order = range(num_microbatches) if schedule is None else _forwards(schedule)
        sums = OrderedSums(parameters, schedule, order)
        scope = GradientScope(each for found in parameters for each in found)
        # On a thread of its own, as a rank is: the caller's autocast must not be around the backward.
        with ThreadPoolExecutor(1) as executor:
            executor.submit(oracle.run, order, scope, sums).result()
        ties.gather(range(made.num_stages))
    finally:
        ties.undo()
    return loss.total()


def _check_fits(schedule: Schedule | None, num_stages: int, num_microbatches: int) -> None:
    if schedule is None:
        return
    if (schedule.num_stages, schedule.num_microbatches) != (num_stages, num_microbatches) or schedule.is_forward_only:
        kind = "forwards only" if schedule.is_forward_only else "forwards and backwards"
        raise UnsupportedShape(
            f"a schedule of {schedule.num_stages} stages and {schedule.num_microbatches} micro-batches with {kind} was "
            f"given; the model is cut into {num_stages} stages, the batch into {num_microbatches} micro-batches, and a "
            "step trains",
            "pass the pipeline's own schedule, num_stages= and num_microbatches=",
        )
    require_valid(schedule)


def _forwards(schedule: Schedule) -> list[int]:
    """The order of the first stage's forwards: the buffers that forwards write see that order."""
    programs = [schedule.program(rank) for rank in dict.fromkeys(schedule.placement.ranks_of(0))]
    return [a.microbatch for program in programs for a in program if a.kind is Kind.FORWARD and a.stage == 0]


@dataclass(frozen=True)
class Oracle:
    """One step of a whole model, micro-batch after micro-batch.

    Args:
        made: the cut model.
        inputs: per micro-batch.
        loss: of the step.
        ambient: the caller's thread state.
        seed: of all random draws.
        step_index: which step.
        first: the number of the first micro-batch, where others of the same call were before it.
    """

    made: Split
    inputs: Sequence[MicrobatchInputs]
    loss: StepLoss
    ambient: Ambient
    seed: int
    step_index: int
    first: int = 0

    def run(self, order: Sequence[int], scope: GradientScope, sums: OrderedSums) -> None:
        """Forward and backward of each micro-batch, in that order."""
        with self.ambient.entered():
            for microbatch in order:
                scalar = self.forward(microbatch)
                if self.loss.is_deferred:
                    scope.set_apart()
                with drawing_in_backward(self.key(microbatch, "backward")), sums.taking(microbatch):
                    torch.autograd.backward(scalar, torch.full_like(scalar, self.loss.seed(microbatch)))
            sums.finish()
            scope.finish(self.loss.final_scale if self.loss.is_deferred else 1.0)

    def forward(self, microbatch: int) -> Tensor:
        """The scalar that a micro-batch is back-propagated from."""
        inputs = self.inputs[microbatch]
        with self.ambient.autocast():
            output = self.output(microbatch, (inputs.args, inputs.kwargs))
            with drawing(self.key(microbatch, "loss_fn")):
                return self.loss.compute(microbatch, output, inputs.target)

    def output(self, microbatch: int, inputs: Inputs) -> Any:
        """What the whole model makes of the inputs of a micro-batch."""

        def draws(unit: str, call: int) -> AbstractContextManager[None]:
            return drawing(self.key(microbatch, unit), call)

        cut = self.made.cut
        if cut is not None:
            cut.refresh()
        return self.whole(inputs, draws) if cut is None else cut.run_whole(cut.plan(inputs, draws), inputs, draws)

    @cached_property
    def whole(self) -> Stage:
        """The model as one stage."""
        return Stage(0, self.made.units)

    def key(self, microbatch: int, unit: str) -> DrawKey:
        """Where the random numbers of a unit come from."""
        return DrawKey(self.seed, self.step_index, 0, self.first + microbatch, unit)
