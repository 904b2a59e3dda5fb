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
        """``(batch, ...)`` → the same."""
        waited: Tensor = _Wait.apply(value, self.weight, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return waited


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, _weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        _wait(forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _wait(ctx.backward_s)
        return grads[0], torch.zeros(()), None, None


def _wait(duration_s: float) -> None:
    """Not even yield for nothing: a stage without work shows what the pipeline itself costs."""
    if duration_s > 0:
        time.sleep(duration_s)


def virtual_stages(num_stages: int, forward_s: float = 0.01, backward_s: float = 0.02) -> list[nn.Module]:
    """Stages for `pipeloom.Pipeline` that take the same times each."""
    return [VirtualStage(forward_s, backward_s) for _ in range(num_stages)]


def virtual_costs(num_stages: int, forward_s: float = 0.01, backward_s: float = 0.02) -> Costs:
    """What `pipeloom.simulate` needs to know of them; the backward is not split, so all of it is input gradient."""
    return Costs.uniform(num_stages, forward_s=forward_s, input_grad_s=backward_s, weight_grad_s=0.0)
