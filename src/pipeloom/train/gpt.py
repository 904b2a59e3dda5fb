"""The default model: a byte-level GPT, written plainly.

Children are the embedding, the blocks and the head, each taking and returning one tensor, so a stage may
begin at any of them.  Positions are rotary (Su et al. 2021, section 3.2) rather than learned: attention
finds "the byte before" within tens of steps instead of hundreds, which is most of a run of three minutes.

Shapes: B windows, T bytes, C = width, H heads, D = C / H.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812: everybody's name for it
from torch import Tensor, nn

from pipeloom.train.config import ModelConfig

NUM_BYTES = 256
_ROTARY_BASE = 1000.0  # wavelengths up to some thousand bytes; windows are shorter


def gpt(config: ModelConfig) -> nn.Sequential:
    """Return a GPT that maps bytes (B, T) int64 to the logits of the next byte, (B, T, 256).

    Weights come from torch's default generator: N(0, 0.02), smaller by √(2 · layers) where a branch
    enters the residual stream (GPT-2, Radford et al. 2019, section 2.3).
    """
    blocks = [Block(config) for _ in range(config.num_layers)]
    model = nn.Sequential(Embedding(config), *blocks, Head(config))
    model.apply(_initialise)
    for block in blocks:
        for linear in (block.attention.out, block.mlp.down):
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.num_layers))
    return model


class Embedding(nn.Module):
    """Bytes (B, T) → (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Look the bytes up."""
        embedded: Tensor = self.dropout(self.bytes(inputs))
        return embedded


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to what came in: (B, T, C) → (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Attention(nn.Module):
    """Causal attention with rotary positions: (B, T, C) → (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to this and earlier positions."""
        projected = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, H, D)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        cos, sin = rotation(x.shape[1], query.shape[-1], x.device)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(attended.transpose(1, 2).flatten(2))  # (B, T, C)
        return mixed


class MLP(nn.Module):
    """Two linears with a GELU between: (B, T, C) → (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both."""
        mixed: Tensor = self.down(F.gelu(self.up(x)))
        return mixed


class Head(nn.Module):
    """(B, T, C) → logits (B, T, 256)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, NUM_BYTES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Score every next byte."""
        logits: Tensor = self.out(self.norm(x))
        return logits


def rotation(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position × frequency, (length, width / 2) each."""
    frequencies = _ROTARY_BASE ** -(torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(length, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels (d, d + D/2) of (B, H, T, D) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x.dtype)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
