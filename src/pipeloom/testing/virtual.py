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


class VirtualStage(nn.Module):
    """A stage that returns its input after ``forward_s`` seconds, and its gradient after ``backward_s``.

    Args:
        forward_s: seconds that a forward of one micro-batch takes.
        backward_s: seconds that its whole backward takes.
    """

    def __init__(self, forward_s: float = 0.01, backward_s: float = 0.02) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        """``(batch, ...)`` → the same; what autograd does for this stage is part of its time."""
        end_s = time.perf_counter() + self.forward_s
        backward = _Backward(self.backward_s)
        weight: Tensor = self.weight
        # The backward has to wait on its way out even where nobody asks for the gradient of the input.
        if value.requires_grad:
            value = _Wait.apply(value, backward)  # type: ignore[no-untyped-call]
        else:
            weight = _Wait.apply(weight, backward)  # type: ignore[no-untyped-call]
        result: Tensor = _Begin.apply(value, weight, backward)  # type: ignore[no-untyped-call]
        _wait_until(end_s)
        return result


class _Backward:
    """One backward of a stage, which begins at the stage's output and ends at its input."""

    __slots__ = ("duration_s", "end_s")

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self.end_s = 0.0


class _Begin(torch.autograd.Function):
    """Where the gradient comes in: from here on the stage's time runs, and its weight gets its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, backward: _Backward) -> Tensor:
        ctx.backward_time = backward
        ctx.weight_grad = torch.zeros_like(weight)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.backward_time.end_s = time.perf_counter() + ctx.backward_time.duration_s
        return grads[0], ctx.weight_grad, None


class _Wait(torch.autograd.Function):
    """Where the gradient goes out: not before the stage's time is over."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, backward: _Backward) -> Tensor:
        ctx.backward_time = backward
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _wait_until(ctx.backward_time.end_s)
        return grads[0], None


def _wait_until(end_s: float) -> None:
    """Not even yield if it is past: a stage without work shows what the pipeline itself costs."""
    if (left_s := end_s - time.perf_counter()) > 0:
        time.sleep(left_s)


def virtual_stages(num_stages: int, forward_s: float = 0.01, backward_s: float = 0.02) -> list[nn.Module]:
    """Stages for `pipeloom.Pipeline` that take the same times each."""
    return [VirtualStage(forward_s, backward_s) for _ in range(num_stages)]


def virtual_costs(num_stages: int, forward_s: float = 0.01, backward_s: float = 0.02) -> Costs:
    """What `pipeloom.simulate` needs to know of them; the backward is not split, so all of it is input gradient."""
    return Costs.uniform(num_stages, forward_s=forward_s, input_grad_s=backward_s, weight_grad_s=0.0)
