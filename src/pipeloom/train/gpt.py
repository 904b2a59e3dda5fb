"""The default model: a byte-level GPT, written plainly.

Every child takes one tensor and returns one, so a stage may begin at any of them. Two things differ from GPT-2,
because a run of three minutes has hundreds of steps, not thousands: positions are rotary (Su et al. 2021, section
3.2) rather than learned, and the embedding sees the bytes just before, so that attention need not first find them.

Shapes: B windows, T bytes, C = width, H heads, D = C / H.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pipeloom.errors import ConfigError
from pipeloom.train.config import ModelConfig

NUM_BYTES = 256
_BYTES_SEEN = 4  # by the embedding
_ROTARY_BASE = 1000.0  # wavelengths up to some thousand bytes; windows are shorter


def gpt(config: ModelConfig) -> nn.Sequential:
    """Return a GPT that maps bytes (B, T) int64 to logits of the next byte, (B, T, 256).

    Weights come from torch's default generator: N(0, 1 / C), smaller by √(2 · layers) where a branch enters the
    residual stream (GPT-2, Radford et al. 2019, section 2.3, which has 0.02 for all widths).

    Raises:
        ConfigError: the heads do not divide the width into parts of even size.
    """
    if config.width % (2 * config.num_heads):
        raise ConfigError(
            f"model.width is {config.width}; with {config.num_heads} heads (model.num_heads) it must be a multiple of "
            f"{2 * config.num_heads}: rotary positions turn pairs of a head's channels",
            "change --model.width or --model.num_heads",
        )
    blocks = [Block(config) for _ in range(config.num_layers)]
    head = nn.Linear(config.width, NUM_BYTES, bias=False)
    model = nn.Sequential(Embedding(config.width), *blocks, nn.LayerNorm(config.width), head)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            enters_residual = name.endswith(("out.weight", "down.weight"))
            num_branches = 2 * config.num_layers if enters_residual else 1
            nn.init.normal_(parameter, std=1 / math.sqrt(config.width * num_branches))
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


class Embedding(nn.Module):
    """Each byte and the three before it, each with a table of its own, added up: (B, T) → (B, T, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(NUM_BYTES, width) for _ in range(_BYTES_SEEN))

    def forward(self, inputs: Tensor) -> Tensor:
        """Look the bytes up; before a window's first byte there are NUL bytes."""
        padded = nn.functional.pad(inputs, (_BYTES_SEEN - 1, 0))
        embedded: Tensor = sum(table(padded[:, i : i + inputs.shape[1]]) for i, table in enumerate(self.tables))
        return embedded


class Block(nn.Module):
    """Pre-norm causal attention and MLP, each added to what came in: (B, T, C) → (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches."""
        x = x + self.dropout(self.attend(self.attention_norm(x)))
        hidden = nn.functional.gelu(self.up(self.mlp_norm(x)))  # (B, T, 4C)
        out: Tensor = x + self.dropout(self.down(hidden))
        return out

    def attend(self, x: Tensor) -> Tensor:
        """Attend to this and earlier positions, (B, T, C) → (B, T, C)."""
        projected = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, H, D)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        attended = scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        mixed: Tensor = self.out(attended.transpose(1, 2).flatten(2))  # (B, T, C)
        return mixed


def rotate(x: Tensor) -> Tensor:
    """Turn each pair of channels (d, d + D/2) of (B, H, T, D) by an angle that grows with the position."""
    length, width = x.shape[-2:]
    frequencies = _ROTARY_BASE ** -(torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.outer(torch.arange(length, device=x.device), frequencies)  # (T, D/2)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
