"""One model twice: its backward whole, and in two halves, over several micro-batches; every bit has to be the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.halves import Halves

Contexts = Callable[[], AbstractContextManager[Any]]


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for item in value for each in tensors_of(item)] if isinstance(value, tuple | list) else []


def seeds_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    kinds = [torch.complex128 if each.is_complex() else torch.float64 for each in outputs]
    return [
        torch.randn(each.shape, generator=generator, dtype=kind).to(each.dtype)
        for each, kind in zip(outputs, kinds, strict=True)
    ]


def leaves_of(args: Sequence[Any]) -> list[Any]:
    return [arg.detach().clone().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) else arg for arg in args]


def run_whole(model: Any, args: Sequence[Any], context: Contexts = nullcontext) -> tuple[list[Any], list[Tensor]]:
    args = leaves_of(args)
    with context():
        outputs = tensors_of(model(*args))
    outputs = [each for each in outputs if each.requires_grad]
    torch.autograd.backward(outputs, seeds_of(outputs))
    return args, outputs


def run_halves(
    model: Any, args: Sequence[Any], context: Contexts = nullcontext
) -> tuple[list[Any], list[Tensor], Halves]:
    """The forward and I; W is left to the caller."""
    halves, args = Halves(), leaves_of(args)
    with halves.forward(), context():
        outputs = tensors_of(model(*args))
    outputs = [each for each in outputs if each.requires_grad]
    with halves.input_gradients():
        torch.autograd.backward(outputs, seeds_of(outputs))
    return args, outputs, halves


def check(
    model: nn.Module,
    *args: Any,
    waiting: int | None = None,
    context: Contexts = nullcontext,
    seed: int = 0,
    num_microbatches: int = 3,
) -> nn.Module:
    """Hold both against each other; return the model that was split.

    Args:
        model: copied for the whole backward.
        args: of its forward.
        waiting: how many functions have to be left for W.
        context: put around the forwards.
        seed: of draws, the same on both sides.
        num_microbatches: gradients add up over so many, of which the Ws come two Is later.
    """
    whole, late = copy.deepcopy(model), []
    for microbatch in range(num_microbatches):
        scaled = [
            arg * (1 + microbatch) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args
        ]
        scaled = [
            new.detach().requires_grad_(old.requires_grad) if isinstance(old, Tensor) else new
            for new, old in zip(scaled, args, strict=True)
        ]
        torch.manual_seed(seed + microbatch)
        expected, expected_outputs = run_whole(whole, scaled, context)
        torch.manual_seed(seed + microbatch)
        found, outputs, halves = run_halves(model, scaled, context)
        if waiting is not None:
            assert halves.num_waiting == waiting
        same(outputs, expected_outputs)
        same([arg.grad for arg in found if isinstance(arg, Tensor)], [
            arg.grad for arg in expected if isinstance(arg, Tensor)
        ])  # fmt: skip
        late.append(halves)
        if len(late) > 2:
            late.pop(0).weight_gradients()
    for halves in late:
        halves.weight_gradients()
        assert halves.num_waiting == 0
    same_gradients(model, whole)
    return model


def same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            assert one.layout == other.layout
            assert torch.equal(one.detach().to_dense(), other.detach().to_dense())


def same_gradients(model: nn.Module, whole: nn.Module) -> None:
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        one, other = parameter.grad, expected[name].grad
        assert (one is None) == (other is None), name
        if one is not None and other is not None:
            assert one.dtype == other.dtype, name
            assert torch.equal(one.to_dense(), other.to_dense()), name


class Calls(nn.Module):
    """A module of parameters and a function of them: ``Calls(lambda self, x: F.linear(x, self.w), w=...)``."""

    def __init__(self, function: Callable[..., Any], **parameters: Any) -> None:
        super().__init__()
        self.function = function
        for name, each in parameters.items():
            is_parameter = isinstance(each, Tensor) and each.is_floating_point()
            setattr(self, name, nn.Parameter(each) if is_parameter and not isinstance(each, nn.Parameter) else each)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def draw(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False, seed: int = 1) -> Tensor:
    """Random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_(grad)
