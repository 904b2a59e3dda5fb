"""A model of one's own for `pipeloom train`: causal convolutions over bytes.

From the repository's root:

    .venv/bin/pipeloom train --config examples/debug.toml --model examples.own_model:convolutions

The function takes nothing, or the [model] section of the configuration, and returns an nn.Sequential that maps bytes
(batch, length) to logits of the next byte (batch, length, 256). Any child may be the first of a stage.
"""

from torch import Tensor, nn

from pipeloom.train.config import ModelConfig


class CausalConvolution(nn.Module):
    """Mix each position with the three before it: (batch, length, width) → the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, kernel_size=4)

    def forward(self, x: Tensor) -> Tensor:
        padded = nn.functional.pad(self.norm(x).transpose(1, 2), (3, 0))
        return x + self.mix(padded).relu().transpose(1, 2)


def convolutions(section: ModelConfig) -> nn.Sequential:
    layers = [CausalConvolution(section.width) for _ in range(section.num_layers)]
    return nn.Sequential(nn.Embedding(256, section.width), *layers, nn.Linear(section.width, 256))
