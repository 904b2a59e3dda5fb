"""Virtual devices: stages that wait a set time instead of computing.

Two cores cannot run four ranks at once, but they can let four ranks sleep at once: so the times of a schedule can be
measured honestly on any machine, and compared with its simulation.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.cost import Costs
from pipeloom.errors import CostError
from pipeloom.halves import splittable


class VirtualStage(nn.Module):
    """A stage that returns its input after ``forward_s`` seconds, and its gradient after ``backward_s``.

    Args:
        forward_s: seconds that a forward of one micro-batch takes, and a recompute.
        backward_s: seconds that its whole backward takes.
        weight_grad_s: what of them is the weight's. Where the backward comes in two halves, W takes it, and I the rest.

    Raises:
        CostError: ``weight_grad_s`` is more than the whole backward, or negative.
    """

    def __init__(self, forward_s: float = 0.01, backward_s: float = 0.02, weight_grad_s: float = 0.0) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.input_grad_s = _input_grad_s(backward_s, weight_grad_s)
        self.weight_grad_s = weight_grad_s
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        """``(batch, ...)`` → the same; what autograd does for this stage is part of its time."""
        end_s = time.perf_counter() + self.forward_s
        clock = _Clock()
        if torch.is_grad_enabled() and value.is_floating_point() and not value.requires_grad:
            value = value.detach().requires_grad_()  # I takes its time even where nobody asks for the gradient
        waited = _Wait.apply(value, clock, self.input_grad_s)  # type: ignore[no-untyped-call]
        result: Tensor = _passed(waited, self.weight, clock, self.weight_grad_s)
        _wait_until(end_s)
        return result


class _Clock:
    """Until when the walk of a backward has come, in its stage's own time."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0

    def wait(self, duration_s: float) -> None:
        """Spend time of the stage; what ran meanwhile is part of it."""
        self.now_s += duration_s
        _wait_until(self.now_s)


@splittable
def _passed(value: Tensor, weight: Tensor, clock: _Clock, weight_grad_s: float) -> Tensor:
    waited = _Wait.apply(weight, clock, weight_grad_s)  # type: ignore[no-untyped-call]
    result: Tensor = _Begin.apply(value, waited, clock)  # type: ignore[no-untyped-call]
    return result


class _Begin(torch.autograd.Function):
    """Where a walk begins, that of a whole backward, of I or of W: from here on the stage's time runs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, clock: _Clock) -> Tensor:
        ctx.clock = clock
        ctx.weight_grad = torch.zeros_like(weight)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.now_s = time.perf_counter()
        return grads[0], ctx.weight_grad, None


class _Wait(torch.autograd.Function):
    """Where a gradient goes out: not before its time is over. Autograd comes here if somebody wants the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, clock: _Clock, duration_s: float) -> Tensor:
        ctx.clock, ctx.duration_s = clock, duration_s
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.wait(ctx.duration_s)
        return grads[0], None, None


def _wait_until(end_s: float) -> None:
    """Not even yield if it is past: a stage without work shows what the pipeline itself costs."""
    if (left_s := end_s - time.perf_counter()) > 0:
        time.sleep(left_s)


def virtual_stages(
    num_stages: int, forward_s: float = 0.01, backward_s: float = 0.02, weight_grad_s: float = 0.0
) -> list[nn.Module]:
    """Stages for `pipeloom.Pipeline` that take the same times each."""
    return [VirtualStage(forward_s, backward_s, weight_grad_s) for _ in range(num_stages)]


def virtual_costs(
    num_stages: int, forward_s: float = 0.01, backward_s: float = 0.02, weight_grad_s: float = 0.0
) -> Costs:
    """What `pipeloom.simulate` needs to know of them."""
    input_grad_s = _input_grad_s(backward_s, weight_grad_s)
    return Costs.uniform(num_stages, forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s)


def _input_grad_s(backward_s: float, weight_grad_s: float) -> float:
    if not 0 <= weight_grad_s <= backward_s:
        raise CostError(
            f"weight_grad_s={weight_grad_s:g} was given with backward_s={backward_s:g}; the gradient of the weight is "
            "a part of the whole backward",
            "give the seconds of both halves together as backward_s",
        )
    return backward_s - weight_grad_s
