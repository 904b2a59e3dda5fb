"""The model and the bigram, scored on the same held-out bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812: everybody's name for it
from torch import Tensor

from pipeloom.errors import ConfigError
from pipeloom.pipeline import Pipeline
from pipeloom.train.batches import as_inputs_and_targets, held_out_windows
from pipeloom.train.bigram import Bigram
from pipeloom.train.config import TrainingConfig
from pipeloom.train.corpus import Corpus
from pipeloom.train.gpt import NUM_BYTES
from pipeloom.train.metrics import HeldOutRecord

Precision = Callable[[], contextlib.AbstractContextManager[object]]
_WINDOWS_AT_ONCE = 64


class HeldOut:
    """Fixed windows of held-out text, and what the bigram of the training text loses on them."""

    def __init__(self, corpus: Corpus, config: TrainingConfig, precision: Precision) -> None:
        num_windows = config.metrics.num_held_out_windows
        windows = held_out_windows(corpus.held_out, num_windows, config.model.sequence_length)
        self._precision = precision
        self._inputs, self._targets = as_inputs_and_targets(windows)
        self.bigram_loss = Bigram(corpus.training).nats_per_byte(windows)

    def evaluate(self, pipe: Pipeline, step: int) -> HeldOutRecord:
        """Score the model as it stands; leaves it in training mode."""
        pipe.eval()
        batches = zip(self._inputs.split(_WINDOWS_AT_ONCE), self._targets.split(_WINDOWS_AT_ONCE), strict=True)
        total = sum(self._loss_sum(pipe, inputs, targets) for inputs, targets in batches)
        pipe.train()
        return HeldOutRecord(step, total / self._targets.numel(), self.bigram_loss)

    def _loss_sum(self, pipe: Pipeline, inputs: Tensor, targets: Tensor) -> float:
        with self._precision():
            logits = pipe(inputs)
        return float(cross_entropy(logits, targets, reduction="sum"))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats per byte, a scalar, of logits (B, T, 256) against bytes (B, T).

    Raises:
        ConfigError: the logits have another shape: the user's model is not one of bytes.
    """
    return cross_entropy(logits, targets, reduction="mean")


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Check the shape and score in float32, whatever the model's precision."""
    expected = (*targets.shape, NUM_BYTES)
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != expected:
        raise ConfigError(
            f"the model returned {shape}; next-byte logits of shape {expected} are needed",
            "let the model map int64 bytes (B, T) to logits (B, T, 256)",
        )
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


def precision_of(autocast: str, device_type: str = "cpu") -> Precision:
    """Return a factory of contexts for the forward pass: bfloat16 autocast, or nothing."""
    if autocast == "off":
        return contextlib.nullcontext
    return lambda: torch.autocast(device_type, dtype=torch.bfloat16)
