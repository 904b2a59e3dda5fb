"""Loss and gradients of one step as the un-pipelined model finds them.

Micro-batches run one after another, forward and backward, on the user's own module; what the step will find is left
untouched. Gradients wait on the CPU, so that a device need hold no second set of them during the step.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeloom.batch.losses import StepLoss
from pipeloom.batch.trees import flatten, unflatten
from pipeloom.ir import Schedule
from pipeloom.parity.kept import as_before
from pipeloom.parity.whole_model import call_whole
from pipeloom.runtime.boundary import moved
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.draws import drawing, drawing_in_backward
from pipeloom.runtime.gradients import GradientScope
from pipeloom.runtime.sums import OrderedSums
from pipeloom.splitting import Inputs, Split, Ties


@dataclass(frozen=True)
class Expected:
    """What the un-pipelined model computes.

    Args:
        loss: of the batch, a scalar.
        grads: per parameter, by its id, what its gradient is to be after the step.
        input_grads: per micro-batch, the gradients of the leaves of its inputs, before they are scaled.
    """

    loss: Tensor
    grads: dict[int, Tensor | None]
    input_grads: dict[int, list[Tensor | None]]


def expected_of(
    made: Split, ties: Ties, context: StepContext, loss: StepLoss, schedule: Schedule, device: torch.device | None
) -> Expected:
    """Run the whole model.

    Args:
        made: the cut model, all of it in this process.
        ties: its tied weights.
        context: of the step that comes; not changed.
        loss: of that step; not changed.
        schedule: in whose order gradients are added up.
        device: where inputs go; None leaves them where they are.
    """
    loss = replace(loss, values={}, returned_counts={})
    stages = made.parameters(loss.rule.parameters)
    scope = GradientScope([*made.root.parameters(), *(each for parameters in stages for each in parameters)])
    # In the order that most stages want: what comes too early for a stage is kept until its turn.
    orders = Counter(schedule.accumulation_order(stage) for stage in range(made.num_stages))
    ((order, _),) = orders.most_common(1)
    sums = OrderedSums(stages, schedule, order)
    run = _Run(made, context, loss, device)
    with as_before(made.root, context.batch), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step itself says the same
        try:
            # On a thread of its own, as a rank is: the caller's autocast must not be around the backward.
            with ThreadPoolExecutor(1) as executor:
                executor.submit(run.microbatches, order, scope, sums).result()
            ties.gather(range(made.num_stages))
            grads = {id(each): _apart(each.grad) for each in (*made.root.parameters(), *loss.rule.parameters)}
        finally:
            scope.restore()
        return Expected(loss.total().cpu(), grads, run.input_grads)


@dataclass
class _Run:
    made: Split
    context: StepContext
    loss: StepLoss
    device: torch.device | None
    input_grads: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def microbatches(self, order: Iterable[int], scope: GradientScope, sums: OrderedSums) -> None:
        with self.context.ambient.entered(), torch.enable_grad():
            for microbatch in order:
                try:
                    self._microbatch(microbatch, scope, sums)
                except Exception as error:
                    error.add_note(f"in the un-pipelined run of verify=True, micro-batch {microbatch}")
                    raise
            sums.finish()
            scope.finish(self.loss.final_scale if self.loss.is_deferred else 1.0)

    def _microbatch(self, microbatch: int, scope: GradientScope, sums: OrderedSums) -> None:
        given = self.context.inputs[microbatch]
        leaves, structure = flatten((given.args, given.kwargs))
        # A graph that inputs bring along belongs to the caller, and is for the step itself.
        own = [_cut_off(leaf) for leaf in leaves]
        scalar = self._forward(microbatch, unflatten(own, structure))
        if self.loss.is_deferred:
            scope.set_apart()
        with drawing_in_backward(self.context.draw_key(microbatch, "backward")), sums.taking(microbatch):
            torch.autograd.backward(scalar, torch.full_like(scalar, self.loss.seed(microbatch)))
        self.input_grads[microbatch] = [_apart(leaf.grad) if _is_trained(leaf) else None for leaf in own]

    def _forward(self, microbatch: int, inputs: Inputs) -> Tensor:
        plan = self.context.plans[microbatch] if self.context.plans else None
        draws: Callable[..., Any] = self.context.draws(microbatch)
        with self.context.ambient.autocast():
            output = call_whole(self.made, plan, moved(inputs, self.device), draws)  # type: ignore[arg-type]
            target = moved(self.context.inputs[microbatch].target, self.device)
            with drawing(self.context.draw_key(microbatch, "loss_fn")):
                return self.loss.compute(microbatch, output, target)


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _cut_off(leaf: Any) -> Any:
    return leaf.detach().requires_grad_() if _is_trained(leaf) else leaf


def _apart(grad: Tensor | None) -> Tensor | None:
    """A gradient that stays as it is, on the CPU."""
    if grad is None:
        return None
    return grad.detach().clone() if grad.device.type == "cpu" else grad.detach().cpu()
