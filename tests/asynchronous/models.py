"""Models, batches and optimizers of the tests of streams."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeloom.schedules.registry import ENTRIES

WIDTH = 6
RULES = {"pipedream": "weight-stashing", "pipedream-vertical-sync": "vertical-sync", "pipedream-2bw": "2bw"}
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.02, weight_decay=0.1),
}
assert RULES.keys() == {name for name, entry in ENTRIES.items() if entry.is_asynchronous}


def square(output, target):
    return (output - target).square().mean()


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make()


def batches(num_batches, num_rows=8, width=WIDTH):
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randn(2, num_rows, width, generator=generator)) for _ in range(num_batches)]


def chain(num_layers=4):
    """With dropout, buffers, and a layer that works in place."""
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2))
        for _ in range(num_layers)
    ]
    return nn.Sequential(*layers)


def plain():
    """Four layers and nothing else."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


class Skips(nn.Module):
    """A value that skips all stages, a scale that glue uses, and layers: cut by running it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        first = x = self.first(x) * self.scale
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.drop(x + first)


class Checkpointed(nn.Module):
    """A layer that runs again in the backward, from the weights that its module has then."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Recurrent(nn.Module):
    """An LSTM keeps its weights in a list of its own too."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.lstm(x[:, None])[0][:, 0]


MODELS = {
    "chain": chain,
    "skips": Skips,
    "checkpointed": lambda: nn.Sequential(*[Checkpointed() for _ in range(4)]),
    "recurrent": lambda: nn.Sequential(*[Recurrent() for _ in range(4)]),
}
