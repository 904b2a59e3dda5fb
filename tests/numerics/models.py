"""Small models that stand for what people train; each with a batch and a loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


def stages(default: int) -> int:
    """How many stages a test has that is about no number: one for each process, where there are several."""
    return NUM_PROCESSES if NUM_PROCESSES > 1 else default


def every_other(num_stages: int) -> list[bool]:
    """Recompute in stage 1, 3, …"""
    return [stage % 2 == 1 for stage in range(num_stages)]


@dataclass(frozen=True)
class Case:
    """A model to build (the same weights every time), inputs, targets and a loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss_fn: Callable[..., Any]


def _seeded(layers: Callable[[], list[nn.Module]]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return nn.Sequential(*layers())

    return build


def _rows(shape: tuple[int, ...], num_classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(num_rows: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(num_rows)
        inputs = torch.randn(num_rows, *shape, generator=generator)
        return inputs, torch.randint(num_classes, (num_rows,), generator=generator)

    return batch


def _tokens(num_rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(17, (num_rows, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    """A pre-norm transformer block with dropout in three places."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 3, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 12) → (B, T, 12)."""
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(x)


class Pair(nn.Module):
    """Returns a tuple: what it computed and what it got."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(B, width) or a pair of them → a pair."""
        x, skip = value if isinstance(value, tuple) else (value, value)
        return torch.tanh(self.linear(x)) * skip, skip


class Join(nn.Module):
    """A pair → a dict → logits."""

    def __init__(self, width: int, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last
        self.linear = nn.Linear(width, 3)

    def forward(self, value: Any) -> Any:
        """A pair or a dict → a dict, or logits (B, 3)."""
        if isinstance(value, tuple):
            return {"sum": value[0] + value[1], "mask": value[1] > 0}
        return self.linear(value["sum"] * value["mask"])


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over tokens; (B, T, V) and (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def transformer(dropout: float) -> Case:
    """Tokens, three blocks, logits."""
    layers = _seeded(lambda: [nn.Embedding(17, 12), *(Block(dropout) for _ in range(3)), nn.Linear(12, 17)])
    return Case(layers, _tokens, token_loss)


CASES = {
    "mlp": Case(
        _seeded(
            lambda: [
                nn.Linear(6, 10),
                nn.ReLU(inplace=True),
                nn.Linear(10, 10),
                nn.GELU(),
                nn.LayerNorm(10),
                nn.Linear(10, 3),
            ]
        ),
        _rows((6,), 3),
        nn.CrossEntropyLoss(),
    ),
    "convolution": Case(
        _seeded(
            lambda: [
                nn.Conv2d(2, 5, 3, padding=1),
                nn.BatchNorm2d(5),
                nn.ReLU(inplace=True),
                nn.Conv2d(5, 4, 3),
                nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
                nn.Linear(4, 3),
            ]
        ),
        _rows((2, 7, 7), 3),
        nn.CrossEntropyLoss(),
    ),
    "dropout": Case(
        _seeded(lambda: [nn.Linear(6, 10), nn.Dropout(0.4), nn.Linear(10, 10), nn.AlphaDropout(0.2), nn.Linear(10, 3)]),
        _rows((6,), 3),
        nn.CrossEntropyLoss(),
    ),
    "transformer": transformer(0.0),
    "transformer-dropout": transformer(0.2),
    "containers": Case(
        _seeded(lambda: [Pair(6), Pair(6), Join(6, False), Join(6, True)]),
        _rows((6,), 3),
        nn.CrossEntropyLoss(),
    ),
}
