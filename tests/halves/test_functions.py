"""Functions that are split, over shapes, types and layouts: bits of both halves are those of the whole backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom.halves import functions
from tests.halves.both import Calls, check, draw

SHAPES = [(5, 32), (32,), (2, 3, 32), (2, 3, 4, 32), (1, 32), (0, 32), (2, 0, 32), (1, 1, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_linear(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    check(nn.Linear(32, 40, bias=bias, dtype=dtype), draw(*shape, dtype=dtype, grad=True), waiting=1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1),
    "strided": lambda x: x[:, ::2],
    "permuted": lambda x: x.permute(1, 0, 2).contiguous().permute(1, 0, 2),
    "one row": lambda x: x[:1, :1],
    "column": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_linear_on_layouts(name: str) -> None:
    model = Calls(lambda self, x: F.linear(LAYOUTS[name](x), self.w, self.b), w=draw(40, 32, seed=2), b=draw(40))
    check(model, draw(4, 4, 32, grad=True), waiting=1)


@pytest.mark.parametrize("name", ["transposed", "expanded", "strided", "one row", "column"])
def test_gradient_on_layouts(name: str) -> None:
    model = Calls(lambda self, x: LAYOUTS[name](F.linear(x, self.w, self.b)), w=draw(40, 32, seed=2), b=draw(40))
    check(model, draw(4, 4, 32, grad=True), waiting=1)


@pytest.mark.parametrize("column", [1, 2])
def test_linear_of_thin_input(column: int) -> None:
    """A column has strides that autograd takes for a transposed matrix, and multiplies the other way round."""
    model = Calls(lambda self, x: F.linear(x, self.w @ self.v), w=draw(40, 32), v=draw(32, column, seed=2))
    check(model, draw(6, column, grad=True))


@pytest.mark.parametrize("transposed", [False, True])
def test_weight_layouts(transposed: bool) -> None:
    weight = draw(32, 40).t() if transposed else draw(40, 64)[:, ::2]
    check(Calls(lambda self, x: F.linear(x, self.w), w=nn.Parameter(weight)), draw(2, 5, 32, grad=True), waiting=1)


CONVOLUTIONS: list[Any] = [
    (nn.Conv1d(16, 32, 3), (2, 16, 9)),
    (nn.Conv2d(16, 32, 3, padding=1, stride=2), (2, 16, 8, 8)),
    (nn.Conv2d(16, 32, 3, padding="same", padding_mode="reflect", dilation=2), (2, 16, 8, 8)),
    (nn.Conv2d(32, 64, 3, groups=2), (2, 32, 6, 6)),
    (nn.Conv2d(32, 48, 1, bias=False), (32, 6, 6)),
    (nn.Conv3d(16, 32, 2), (1, 16, 4, 4, 4)),
    (nn.ConvTranspose1d(16, 32, 3), (2, 16, 5)),
    (nn.ConvTranspose2d(16, 32, 3, stride=2, output_padding=1), (2, 16, 5, 5)),
    (nn.ConvTranspose3d(16, 32, 2), (1, 16, 3, 3, 3)),
]


@pytest.mark.parametrize(
    ("model", "shape"), CONVOLUTIONS, ids=lambda each: str(each) if isinstance(each, tuple) else ""
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions(model: nn.Module, shape: tuple[int, ...], layout: torch.memory_format) -> None:
    model, value = copy.deepcopy(model), draw(*shape)
    if len(shape) == 4:
        value = value.contiguous(memory_format=layout)
        model = model.to(memory_format=layout)
    check(model, value.requires_grad_(), waiting=1)


def test_convolutions_in_float64() -> None:
    check(nn.Conv2d(16, 32, 3, dtype=torch.float64), draw(2, 16, 5, 5, dtype=torch.float64, grad=True), waiting=1)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding_idx": 0},
    {"scale_grad_by_freq": True},
    {"sparse": True},
    {"max_norm": 1.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_embedding(options: dict[str, Any]) -> None:
    ids = torch.tensor([[0, 3, 3], [7, 0, 49]])
    check(nn.Embedding(50, 32, **options), ids, waiting=1, num_microbatches=2)


def test_embedding_bag() -> None:
    check(nn.EmbeddingBag(50, 32, mode="mean"), torch.tensor([[0, 3, 3], [7, 0, 49]]), waiting=1)


PRODUCTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "matmul": lambda self, x: torch.matmul(x, self.w),
    "operator": lambda self, x: x @ self.w,
    "reversed": lambda self, x: self.v @ x.mT,
    "mm": lambda self, x: x[0].mm(self.w),
    "bmm": lambda self, x: x.bmm(self.w3),
    "batched": lambda self, x: x @ self.w3,
    "broadcast": lambda self, x: x[:, None] @ self.w3,
    "addmm": lambda self, x: torch.addmm(self.b, x.view(-1, 32), self.w),
    "baddbmm": lambda self, x: torch.baddbmm(x[..., :1], x, self.w3),
    "einsum": lambda self, x: torch.einsum("bsd,do->bso", x, self.w),
    "einsum of heads": lambda self, x: torch.einsum("bsd,bdo->bos", x, self.w3),
    "tensordot": lambda self, x: torch.tensordot(x, self.w, dims=([2], [0])),
    "bilinear": lambda self, x: F.bilinear(x, x * 2, self.w3.mT[:, :32, :32].contiguous()),
    "keywords": lambda self, x: F.linear(input=x, weight=self.v, bias=self.b),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    model = Calls(PRODUCTS[name], w=draw(32, 40), v=draw(40, 32), w3=draw(3, 32, 40, seed=3), b=draw(40))
    check(model, draw(3, 5, 32, grad=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """A weight is cast once for all its uses, and the gradients of these add up in the low type."""
    layer = nn.Linear(32, 32)
    model = Calls(lambda self, x: F.layer_norm(self.layer(torch.tanh(self.layer(self.layer(x)))), (32,)))
    model.layer = layer
    check(model, draw(4, 32, grad=True), waiting=3, context=lambda: torch.autocast("cpu", dtype))


def test_input_without_gradient() -> None:
    """The first stage's: nothing but W is due, and the output has to require a gradient all the same."""
    check(nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 32)), draw(4, 32), waiting=2)


def test_frozen_weight_stays_whole() -> None:
    layer = nn.Linear(32, 40)
    layer.weight.requires_grad_(False)
    check(layer, draw(4, 32, grad=True), waiting=0)


def test_thin_weights_stay_whole() -> None:
    """LoRA's matrices: next to nothing to do in W, for which W would keep the whole input."""
    model = Calls(
        lambda self, x: F.linear(x, self.frozen) + F.linear(F.linear(x, self.a), self.b) * 2,
        a=draw(8, 32),
        b=draw(40, 8),
    )
    model.frozen = nn.Parameter(draw(40, 32), requires_grad=False)
    check(model, draw(2, 4, 32, grad=True), waiting=0)


def test_depthwise_convolution_stays_whole() -> None:
    check(nn.Conv2d(32, 32, 3, groups=32), draw(2, 32, 6, 6, grad=True), waiting=0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_stay_whole(kind: Any) -> None:
    check(kind(16, 32, num_layers=2, batch_first=True), draw(2, 5, 16, grad=True), waiting=0)


def test_norms_stay_whole() -> None:
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.GroupNorm(4, 32), nn.Flatten(), nn.LayerNorm(512)
    )
    check(model, draw(2, 16, 6, 6, grad=True), waiting=1)


@pytest.mark.parametrize(
    ("rows", "width", "is_split"), [(16, 64, True), (15, 64, False), (64, 32, True), (63, 32, False)]
)
def test_small_products_stay_whole(rows, width, is_split, monkeypatch):
    monkeypatch.setattr(functions, "MIN_MULTIPLICATIONS", 1 << 16)
    check(nn.Linear(width, width), draw(rows - (not is_split), width, grad=True), waiting=int(is_split))


@pytest.mark.parametrize(("model", "value", "is_split"), [
    (nn.Conv2d(16, 32, 3), draw(1, 16, 16, 16, grad=True), True),
    (nn.Conv2d(16, 32, 3), draw(1, 16, 3, 3, grad=True), False),
    (nn.Embedding(2048, 32), torch.arange(2), True),
    (nn.Embedding(2047, 32), torch.arange(2000), False),
])  # fmt: skip
def test_small_convolutions_and_tables_stay_whole(model, value, is_split, monkeypatch):
    monkeypatch.setattr(functions, "MIN_MULTIPLICATIONS", 1 << 16)
    check(model, value, waiting=int(is_split))


@pytest.mark.parametrize(("rows", "waiting"), [(32, 3), (8, 0)])
def test_a_weight_may_be_used_by_large_and_small_products(rows, waiting, monkeypatch):
    """The first use decides for all of a micro-batch."""
    monkeypatch.setattr(functions, "MIN_MULTIPLICATIONS", 1 << 16)
    model = Calls(lambda self, x: (self.w @ x.T).T @ self.w + (x[:3] @ self.w).sum(), w=draw(64, 64))
    check(model, draw(rows, 64, grad=True), waiting=waiting)
