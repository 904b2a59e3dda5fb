"""Weights that are shared, computed, viewed, or used by other functions: gradients add up as in the whole backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from pipeloom.errors import RuntimeStateError
from tests.halves.both import Calls, check, draw, run_halves


def square(**more: Any) -> dict[str, Any]:
    return {"w": draw(32, 32, seed=2) / 6, "v": draw(32, 32, seed=3) / 6, "b": draw(32, seed=4), **more}


Body = Callable[[Any, Tensor], Tensor]
BODIES: dict[str, Body] = {
    "used twice": lambda m, x: F.linear(torch.tanh(F.linear(x, m.w)), m.w, m.b),
    "used five times": lambda m, x: _times(5, lambda y: torch.tanh(F.linear(y, m.w, m.b)), x),
    "side by side": lambda m, x: F.linear(x, m.w) * F.linear(x + 1, m.w) * (x @ m.w),
    "transposed": lambda m, x: F.linear(x, m.w) @ m.w.t(),
    "part of it": lambda m, x: F.linear(x[..., :16], m.w[:, :16]) + F.linear(x, m.w),
    "chunks": lambda m, x: torch.cat([F.linear(x, each) for each in m.w.chunk(2)], -1),
    "masked": lambda m, x: F.linear(x, m.w * m.mask),
    "product": lambda m, x: F.linear(x, m.w @ m.v),
    "merged low rank": lambda m, x: F.linear(x, m.frozen + 2 * m.up @ m.down),
    "computed once, used thrice": lambda m, x: _thrice(x, torch.tanh(m.w)),
    "computed, then scaled by hand": lambda m, x: _scaled(x, torch.tanh(m.w)),
    "scale first, then product": lambda m, x: F.linear(x * m.w[0], m.w) * m.w[1],
    "product first, then scale": lambda m, x: F.linear(x, m.w) * m.w[1] + m.w.sum() * x,
    "plain function first": lambda m, x: F.linear(torch.where(x > 0, x, m.b) * m.b, m.w, m.b),
    "whole parameter first": lambda m, x: F.linear(x + m.w, m.w) @ m.w,
    "whole parameter last": lambda m, x: (F.linear(x, m.w) + m.w) @ m.w + m.w * 3,
    "whole in between": lambda m, x: F.linear(F.linear(x, m.w) * m.w.sum() + m.w * x, m.w) + m.w,
    "into a container": lambda m, x: torch.stack([F.linear(x, m.w), m.w.expand(32, 32)]).sum(0),
    "in place into an activation": lambda m, x: F.linear(x, m.w).add_(m.b).mul_(m.w).relu_(),
    "written into rows": lambda m, x: _rows(F.linear(x, m.w), m.w),
    "computed, then in place": lambda m, x: F.linear(x, (m.w * 3).mul_(m.v)) + F.linear(x, m.w),
    "only asked": lambda m, x: F.linear(x, m.w) if not m.w.isnan().any() and m.w.dtype == x.dtype else x,
    "detached too": lambda m, x: F.linear(x, m.w) + F.linear(x, m.w.detach()) + m.w.data.sum(),
    "two layers": lambda m, x: F.linear(F.gelu(F.linear(x, m.w, m.b)), m.v, m.b),
    "no gradient inside": lambda m, x: F.linear(x, m.w) + _without_gradient(x, m.w),
    "biases of another": lambda m, x: F.linear(x, m.frozen, m.b) + F.linear(x, m.w, m.b),
}


def _times(count: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    for _ in range(count):
        x = function(x)
    return x


def _thrice(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(torch.tanh(F.linear(x, w)), w)), w)


def _scaled(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x * w[0], w) * w.sum() + F.linear(x, w) * w


def _rows(x: Tensor, w: Tensor) -> Tensor:
    x = x.clone()
    x[:3] = w[:3]
    x[5] += w[5]
    return x


def _without_gradient(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        return F.linear(x, w * 2)


def model_of(body: Body) -> nn.Module:
    model = Calls(body, **square(up=draw(32, 4), down=draw(4, 32)))
    model.frozen = nn.Parameter(draw(32, 32, seed=5), requires_grad=False)
    model.register_buffer("mask", (draw(32, 32, seed=6) > 0).float())
    return model


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_uses_of_a_weight(name: str, dtype: torch.dtype) -> None:
    body = BODIES[name]
    check(model_of(body).to(dtype), draw(32, 32, dtype=dtype, grad=True))


@pytest.mark.parametrize("name", BODIES)
def test_uses_in_a_first_stage(name: str) -> None:
    """Where the input needs no gradient, ``x + w`` looks like a computation of weights."""
    body = BODIES[name]
    check(model_of(body), draw(32, 32))


@pytest.mark.parametrize("name", BODIES)
def test_uses_under_autocast(name: str) -> None:
    """Autocast keeps its casts of leaves: the input is none, as in the un-pipelined model."""
    body = BODIES[name]
    check(
        nn.Sequential(nn.Tanh(), model_of(body)),
        draw(32, 32, grad=True),
        context=lambda: torch.autocast("cpu", torch.bfloat16),
    )


def test_what_is_split_of_a_shared_weight() -> None:
    body = BODIES["used five times"]
    check(model_of(body), draw(32, 32, grad=True), waiting=5)


@pytest.mark.parametrize(
    "wrap", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_parametrizations(wrap: Any) -> None:
    torch.manual_seed(0)
    check(nn.Sequential(wrap(nn.Linear(32, 32)), nn.Tanh(), wrap(nn.Linear(32, 32))), draw(4, 32, grad=True))


def test_cached_parametrization() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(32, 32)))
    model.append(model[0])
    check(model, draw(4, 32, grad=True), context=parametrize.cached)


def test_tied_embedding() -> None:
    """The embedding comes first; its gradient is added last, and is as large as the table."""
    model = Calls(lambda m, ids: F.linear(torch.tanh(F.embedding(ids, m.w)), m.w), w=draw(50, 32))
    check(model, torch.tensor([[0, 3, 3], [7, 0, 49]]), waiting=2)


def test_added_positions() -> None:
    """The sum of positions and an image that needs no gradient is no weight."""
    model = Calls(lambda m, x: F.linear(torch.cat([m.cls.expand(3, -1, -1), x], 1) + m.p, m.w), **square(
        cls=draw(1, 1, 32), p=draw(1, 6, 32)
    ))  # fmt: skip
    check(model, draw(3, 5, 32), waiting=2)  # the product and the class token


def test_dropped_weights() -> None:
    check(model_of(lambda m, x: F.linear(x, F.dropout(m.w, 0.5))), draw(32, 32, grad=True), seed=3)


def test_user_function_of_a_weight() -> None:
    """An `autograd.Function` is no torch function: nobody sees the weight go in."""
    check(model_of(lambda m, x: _Scale.apply(F.linear(x, m.w), m.b) + _Scale.apply(x, torch.tanh(m.v))),
          draw(32, 32, grad=True))  # fmt: skip


def test_user_function_and_product_of_a_computed_weight() -> None:
    """Both halves would walk the graph of the weight, and I would free it."""

    def body(m: Any, x: Tensor) -> Tensor:
        weight = torch.tanh(m.w)
        return _Scale.apply(F.linear(x, weight), weight)

    check(model_of(body), draw(32, 32, grad=True))


def test_view_of_what_was_written_into() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        weight = torch.tanh(m.w)
        part = weight[:16]
        weight.mul_(2)
        return F.linear(x, part)

    with pytest.raises(RuntimeStateError, match="shares memory with a tensor that was written into"):
        run_halves(model_of(body), [draw(32, 32, grad=True)])


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0] * x
        return grads[0] * weight, grad if weight.ndim == 2 else grad.sum(0)
