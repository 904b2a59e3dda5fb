"""A gradient goes on laid out as it came: kernels sum by layout, so another one has other bits."""

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl


class Permuting(nn.Module):
    """As ConvNeXt's block: a convolution, then linear layers with the channels last."""

    def __init__(self, num_channels=24):
        super().__init__()
        self.conv = nn.Conv2d(num_channels, num_channels, 5, padding=2, groups=num_channels)
        self.norm = nn.LayerNorm(num_channels)
        self.first, self.second = nn.Linear(num_channels, 64), nn.Linear(64, num_channels)
        self.gamma = nn.Parameter(torch.full((num_channels,), 0.5))

    def forward(self, x):
        inner = self.norm(self.conv(x).permute(0, 2, 3, 1))
        inner = self.second(nn.functional.gelu(self.first(inner))) * self.gamma
        return inner.permute(0, 3, 1, 2) + x


class Network(nn.Module):
    """The same blocks in a module that is cut by running it."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.in_one_process
@pytest.mark.parametrize("kind", [nn.Sequential, Network])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_permuted_gradients_keep_their_bits(kind, num_stages):
    """AccumulateGrad laid a boundary's gradient out as its leaf is, and the stage before summed in another order."""
    torch.manual_seed(0)
    model = kind(*(Permuting() for _ in range(4)))
    reference, inputs = copy.deepcopy(model), torch.randn(8, 24, 14, 14)
    with pl.Pipeline(model, num_stages=num_stages, num_microbatches=4, loss_fn=lambda o: o.square().mean()) as pipe:
        pipe.step(inputs)
    for part in inputs.chunk(4):
        (reference(part).square().mean() / 4).backward()
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name
