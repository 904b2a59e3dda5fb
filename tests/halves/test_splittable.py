"""Functions of a user's own that are split as torch's are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from pipeloom.halves import splittable
from pipeloom.testing import sequential_step
from tests.halves.both import Calls, check, draw
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients


@splittable
def scaled_by(value: Tensor, scale: Tensor, *, offset: Tensor | float = 0.0) -> Tensor:
    """Several torch functions, none of which is split by itself."""
    return torch.tanh(value) * scale.exp() + offset


class Square(torch.autograd.Function):
    """Makes both gradients in one node."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value * weight * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        value, weight = ctx.saved_tensors
        return grads[0] * weight * weight, (2 * grads[0] * value * weight).sum(0)


squared = splittable(lambda value, weight: Square.apply(value, weight))  # type: ignore[no-untyped-call]


def test_is_the_function_itself_outside_of_halves() -> None:
    value, scale = draw(3, 4), draw(4)
    assert torch.equal(scaled_by(value, scale, offset=1.0), torch.tanh(value) * scale.exp() + 1.0)
    assert (scaled_by.__name__, scaled_by.__doc__) == (
        "scaled_by",
        "Several torch functions, none of which is split by itself.",
    )


@pytest.mark.parametrize("needs_grad", [True, False])
def test_waits_for_w(needs_grad: bool) -> None:
    model = Calls(lambda m, x: scaled_by(F.gelu(x), m.scale, offset=m.offset), scale=draw(4), offset=draw(4, seed=2))
    check(model, draw(3, 4, grad=needs_grad), waiting=1)


def test_a_function_that_makes_both_gradients_at_once() -> None:
    check(Calls(lambda m, x: squared(x.sin(), m.w), w=draw(4)), draw(3, 4, grad=True), waiting=1)


def test_without_a_parameter_there_is_nothing_to_split() -> None:
    model = Calls(lambda m, x: scaled_by(m.linear(x), torch.ones(4)), linear=nn.Linear(4, 4))
    check(model, draw(3, 4, grad=True), waiting=0)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_in_a_checkpoint(use_reentrant: bool) -> None:
    def forward(model: Any, value: Tensor) -> Any:
        return checkpoint(lambda x: scaled_by(squared(x, model.w), model.scale), value, use_reentrant=use_reentrant)

    check(Calls(forward, w=draw(4), scale=draw(4, seed=2)), draw(3, 4, grad=True), waiting=2)


class Around(nn.Module):
    """The function stands between units, in a parent's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.scale = nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return scaled_by(x, self.scale)


def test_in_a_model_that_is_cut_by_running_it() -> None:
    torch.manual_seed(0)
    model, reference = Around(), Around()
    reference.load_state_dict(model.state_dict())
    x, target = torch.randn(2, 8, 32).unbind()
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 4, "loss_fn": F.mse_loss}
    with pl.Pipeline(model, schedule="zb-h1", **options) as pipe:
        loss = pipe.step(x, target=target)
        assert_bit_equal(loss, sequential_step(reference, x, target=target, **options), "loss")
        assert_same_gradients(pipe, reference)
