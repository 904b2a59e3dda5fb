"""Small models that the tests of the facade and of the runtime share, and a loop with nothing of Pipeloom in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import pipeloom as pl

WIDTH = 4


def chain(*layers: nn.Module) -> nn.Sequential:
    """The layers, or five that end in three columns; the same weights every time."""
    default = (nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    return reset(nn.Sequential(*(layers or default)))


def linears(count: int) -> nn.Sequential:
    """Layers of one shape: ``(B, WIDTH)`` → ``(B, WIDTH)``."""
    return reset(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))))


def reset(model: nn.Sequential) -> nn.Sequential:
    """Draw all weights anew from one seed."""
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def rows(num_rows: int) -> Tensor:
    """``(num_rows, WIDTH)``, always the same."""
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(num_rows))


def mean_square(output: Tensor) -> Tensor:
    """A loss that needs no target."""
    return output.square().mean()


class Calls(nn.Module):
    """A layer without parameters that calls a function of its input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        """Whatever the function returns."""
        return self.function(*args)


class FailsInBackward(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: Any) -> Any:
        raise ZeroDivisionError("the gradient went wrong")


def plain_loop(
    model: Callable[..., Any],
    inputs: Iterable[Tensor],
    num_microbatches: int,
    loss_of: Callable[[Any], Tensor] = mean_square,
) -> Tensor:
    """Micro-batches in order, their losses weighted by rows: gradients add up in the model."""
    parts = [list(tensor.tensor_split(num_microbatches)) for tensor in inputs]
    num_rows = sum(len(part) for part in parts[0])
    total = torch.zeros(())
    for microbatch in zip(*parts, strict=True):
        weight = len(microbatch[0]) / num_rows
        loss = loss_of(model(*microbatch))
        loss.backward(torch.full_like(loss, weight))
        total = total + loss.detach() * weight
    return total


def gradients(model: Any) -> dict[str, Tensor | None]:
    """Copies of all gradients, by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """The same names with the same bits, or with no gradient on both sides."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(found[name], gradient), name


def assert_pipelined_like_plain(
    model: nn.Sequential, *inputs: Tensor, num_microbatches: int = 3, **options: Any
) -> None:
    """One step's gradients have the bits of a plain loop's over the same model."""
    plain = copy.deepcopy(model)
    with pl.Pipeline(model, num_microbatches=num_microbatches, loss_fn=mean_square, **options) as pipe:
        pipe.step(*inputs)
        found = gradients(pipe)
    plain_loop(plain, inputs, num_microbatches)
    assert any(gradient is not None for gradient in found.values())
    assert_same(found, gradients(plain))
