"""Small models with everything that a trial run could disturb."""

from typing import ClassVar

import torch
from torch import nn


class Block(nn.Module):
    """BatchNorm, dropout, a counter in Python and one in a buffer."""

    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, value):
        self.num_calls += 1
        return value + self.dropout(torch.tanh(self.linear(self.norm(value))))


class Net(nn.Module):
    """Cut by running it: a skip from the first block to the end, and glue that draws."""

    def __init__(self, num_blocks=4, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 3)
        self.last_rows = 0

    def forward(self, value):
        self.last_rows = len(value)
        first = value = self.blocks[0](value)
        for block in self.blocks[1:]:
            value = nn.functional.dropout(block(value), 0.1, self.training)
        return self.head(value + first)


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self, num_words=11, width=8):
        super().__init__()
        self.embedding = nn.Embedding(num_words, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(width, num_words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        value = self.embedding(words)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


class Twice(nn.Module):
    """One layer called in every stage: a cut regroups the sum of its gradient."""

    def __init__(self, width=8):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.others = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, value):
        for other in self.others:
            value = torch.tanh(other(self.layer(value)))
        return value


class Drifting(nn.Module):
    """Wrong on purpose: what it computes depends on how often it was called before, and a trial run cannot undo it."""

    calls: ClassVar[list[int]] = []

    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value):
        self.calls.append(len(self.calls))
        return self.linear(value) * (1 + len(self.calls))


def chain(width=8):
    """A Sequential."""
    return nn.Sequential(Block(width), Block(width), nn.Linear(width, 3))


def made(model, seed=0):
    """A model with weights of its own from a seed."""
    torch.manual_seed(seed)
    return model()


def batch(rows=8, width=8, classes=3):
    """Inputs and a target."""
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(rows, width, generator=generator)
    return value, torch.randint(classes, (rows,), generator=generator)
