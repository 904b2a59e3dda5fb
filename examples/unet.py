"""A model whose values skip stages, for `pipeloom split` and `pipeloom check`: a small U-Net.

From the repository's root:

    .venv/bin/pipeloom split examples.unet:unet --stages 3

The function takes nothing and returns the model with inputs for it.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate


class UNet(nn.Module):
    """Images (batch, 3, height, width) → one number for each pixel; each level down is half as high and wide."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(block(a, b) for a, b in zip([3, *widths[:2]], widths, strict=True))
        self.up = nn.ModuleList(block(a + b, b) for a, b in zip(widths[:0:-1], widths[1::-1], strict=True))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for down in self.down:
            x = down(x if not levels else nn.functional.max_pool2d(x, 2))
            levels.append(x)
        for up, level in zip(self.up, reversed(levels[:-1]), strict=True):
            x = up(torch.cat([interpolate(x, scale_factor=2.0), level], 1))
        return self.head(x)


def block(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1), nn.GroupNorm(4, num_out), nn.SiLU())


def unet() -> tuple[nn.Module, tuple[Tensor]]:
    return UNet(), (torch.zeros(4, 3, 64, 64),)
