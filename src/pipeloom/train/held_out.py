"""The model and a bigram, scored on the same held-out bytes.

A loss without a baseline says little, and uniform bytes (5.55 nats) are too easy a one. Counting pairs over
the whole training text is the strongest model with one byte of context, and takes a second.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable

import numpy as np
from torch import Tensor
from torch.nn import functional

from pipeloom.errors import ConfigError
from pipeloom.pipeline import Pipeline
from pipeloom.train.batches import as_inputs_and_targets
from pipeloom.train.corpus import Bytes
from pipeloom.train.gpt import NUM_BYTES
from pipeloom.train.metrics import HeldOutRecord

Precision = Callable[[], contextlib.AbstractContextManager[object]]
_BACKOFF_COUNT = 16.0  # how many observations single-byte frequencies weigh in each context
_WINDOWS_AT_ONCE = 64
_TOTAL = struct.Struct("<d")


class HeldOut:
    """Fixed windows of held-out text, uint8 (windows, bytes), and the losses on them.

    Args:
        windows: what is scored: every byte but the first of each window.
        bigram_loss: the baseline's, nats per byte.
        precision: makes the context in which the model runs.
    """

    def __init__(self, windows: Bytes, bigram_loss: float, precision: Precision) -> None:
        self._inputs, self._targets = as_inputs_and_targets(windows)
        self._bigram_loss = bigram_loss
        self._precision = precision

    def evaluate(self, pipe: Pipeline, step: int) -> HeldOutRecord:
        """Score the model as it stands; leaves it in training mode. Collective: every rank gets the record."""
        starts = range(0, len(self._inputs), _WINDOWS_AT_ONCE)
        total = sum(self._loss_sum(pipe, slice(start, start + _WINDOWS_AT_ONCE)) for start in starts)
        everyones = pipe.group.all_gather(_TOTAL.pack(total), f"the held-out loss after step {step}")
        loss = sum(_TOTAL.unpack(each)[0] for each in everyones) / self._targets.numel()
        return HeldOutRecord(step, loss, self._bigram_loss, self._bigram_loss - loss)

    def probe(self, pipe: Pipeline) -> None:
        """Run one window, so that a model that cannot be trained on bytes fails before anything is written."""
        self._loss_sum(pipe, slice(1))

    def _loss_sum(self, pipe: Pipeline, chosen: slice) -> float:
        pipe.eval()
        with self._precision():
            logits = pipe(self._inputs[chosen])
        pipe.train()
        if logits is None:  # the last stage is on another rank
            return 0.0
        return float(cross_entropy(logits, self._targets[chosen], reduction="sum"))


def bigram_loss(training: Bytes, windows: Bytes) -> float:
    """Return nats per byte of byte pairs counted over ``training`` (1-d), on ``windows`` (windows, bytes).

    Rare contexts fall back on the add-one frequencies of single bytes, which beats adding one to every pair.
    """
    pairs = training[:-1].astype(np.intp) * NUM_BYTES + training[1:]
    counts = np.bincount(pairs, minlength=NUM_BYTES**2).reshape(NUM_BYTES, NUM_BYTES)
    single = np.bincount(training, minlength=NUM_BYTES) + 1.0
    smoothed = counts + _BACKOFF_COUNT * single / single.sum()
    probabilities = smoothed / smoothed.sum(axis=1, keepdims=True)
    return float(-np.log(probabilities[windows[:, :-1], windows[:, 1:]]).mean())


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats per byte, a scalar, of logits (B, T, 256) against bytes (B, T)."""
    return cross_entropy(logits, targets, reduction="mean")


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Score in float32, whatever the model's precision.

    Raises:
        ConfigError: the logits have another shape: the user's model is not one of bytes.
    """
    expected = (*targets.shape, NUM_BYTES)
    given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if given != expected:
        raise ConfigError(
            f"the model returned {given}; next-byte logits of shape {expected} are needed",
            "let the model map int64 bytes (B, T) to logits (B, T, 256)",
        )
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)
