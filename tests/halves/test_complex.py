"""Complex weights, whose gradients take conjugates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.halves.both import Calls, check, draw
from tests.halves.test_functions import LAYOUTS, PRODUCTS, SHAPES
from tests.halves.test_weights import BODIES

COMPLEX = [torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_linear(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    """The gradient of the input was the product with the weight itself, not with its conjugate; nothing said so."""
    check(nn.Linear(32, 40, bias=bias, dtype=dtype), draw(*shape, dtype=dtype, grad=True), waiting=1)


def weights(*names: str) -> dict[str, Any]:
    made = {
        "w": draw(32, 32, dtype=torch.complex64, seed=2) / 6,
        "v": draw(32, 32, dtype=torch.complex64, seed=3) / 6,
        "w3": draw(3, 32, 32, dtype=torch.complex64, seed=4) / 6,
        "b": draw(32, dtype=torch.complex64, seed=5),
        "real": draw(32, 32, seed=6),
    }
    return {name: nn.Parameter(made[name]) for name in names}


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    **{name: use for name, use in PRODUCTS.items() if name not in ("bilinear",)},
    **{
        f"input {name}": (lambda self, x, change=change: F.linear(change(x), self.w))
        for name, change in LAYOUTS.items()
    },
    "conjugated weight": lambda self, x: F.linear(x, self.w.conj(), self.b),
    "conjugated input": lambda self, x: F.linear(x.conj(), self.w, self.b),
    "conjugated output": lambda self, x: F.linear(x, self.w, self.b).conj(),
    "imaginary part": lambda self, x: F.linear(x, self.w).imag,
    "negated view": lambda self, x: F.linear(x.conj().imag, self.real),
    "made of real ones": lambda self, x: F.linear(x, torch.complex(self.real, self.real.t())),
    "real weight": lambda self, x: torch.complex(F.linear(x.real, self.real), F.linear(x.imag, self.real)),
    "adjoint": lambda self, x: x @ self.w @ self.w.mH,
}


@pytest.mark.parametrize("name", USES)
def test_products(name: str) -> None:
    model = Calls(USES[name], **weights("w", "v", "w3", "b", "real"))
    check(model, draw(3, 4, 32, dtype=torch.complex64, grad=True))


PLAIN = ["used twice", "side by side", "transposed", "chunks", "product", "scale first, then product"]


@pytest.mark.parametrize("name", PLAIN)
def test_uses_of_a_weight(name: str) -> None:
    check(Calls(BODIES[name], **weights("w", "v", "b")), draw(8, 32, dtype=torch.complex64, grad=True))
