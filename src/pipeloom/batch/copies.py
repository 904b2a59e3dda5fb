"""Tensors that stand for others: copies at which kernels round as at their originals, leaves, aliases in a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_CACHE_LINE = 64


def copied_alike(tensor: Tensor) -> Tensor:
    """A copy that a kernel cannot tell from the original: same strides, same place within a cache line."""
    source = tensor.detach()
    if source.device.type != "cpu" or source.layout is not torch.strided or not source.numel():
        return source.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
    room = source.new_empty(extent + 2 * _CACHE_LINE)
    start = (source.data_ptr() - room.data_ptr()) % _CACHE_LINE // source.element_size()
    # Its whole stretch of memory, because an expanded tensor can't be written element by element.
    room.narrow(0, start, extent).copy_(source.as_strided((extent,), (1,)))
    return room.as_strided(source.shape, source.stride(), start)


def leaf_like(weight: nn.Parameter, values: Tensor) -> nn.Parameter:
    """A leaf with these values and whatever else the weight has: its class, and attributes of the user's."""
    leaf = nn.Parameter(values, weight.requires_grad)
    be_alike(leaf, weight)
    return leaf


def be_alike(leaf: nn.Parameter, weight: nn.Parameter) -> None:
    """Give a leaf the class and the attributes that the weight has by now: a forward may look at them."""
    if type(leaf) is not type(weight):
        leaf.__class__ = type(weight)
    leaf.__dict__.update({key: value for key, value in vars(weight).items() if not key.startswith("_pipeloom")})


class Alias(torch.autograd.Function):
    """A tensor in the middle of a graph, which may be written into as a leaf may not."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        """The same memory."""
        return value.detach()

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        """The same gradient."""
        return grads[0]
