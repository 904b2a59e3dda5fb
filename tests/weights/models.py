"""Models that keep something beside their parameters."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Holds(nn.Module):
    """A layer and one buffer; ``make`` is told the layer."""

    def __init__(self, make: Callable[[nn.Linear], Tensor], *, persistent: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("kept", make(self.layer), persistent=persistent)


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)) * self.scale)


def drawn_anew(model: nn.Module) -> nn.Module:
    """The model with other values everywhere, so that none is right by chance."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)
            else:
                tensor.add_(7)
    return model
