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
        waited: Tensor = _Wait.apply(value, self.weight, self.backward_s)  # type: ignore[no-untyped-call]
        _wait_until(end_s)
        return waited


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        ctx.weight_grad = torch.zeros_like(weight)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _wait_until(time.perf_counter() + ctx.backward_s)
        return grads[0], ctx.weight_grad, None


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
