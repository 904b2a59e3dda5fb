"""The baseline: what the previous byte alone says about the next one.

A loss without a baseline says little; uniform bytes (5.55 nats) is too easy a one.  Counting pairs over
the whole training text is the strongest model with one byte of context, and takes a second.  Rare
contexts fall back on the add-one frequencies of single bytes, which is never worse in practice than
adding one to every pair.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeloom.train.corpus import Bytes

_NUM_BYTES = 256
_BACKOFF_COUNT = 16.0  # how many observations the single-byte frequencies weigh in a context


class Bigram:
    """Byte pairs counted over a text (1-d uint8)."""

    def __init__(self, text: Bytes) -> None:
        pairs = text[:-1].astype(np.intp) * _NUM_BYTES + text[1:]
        counts = np.bincount(pairs, minlength=_NUM_BYTES**2).reshape(_NUM_BYTES, _NUM_BYTES)
        single = np.bincount(text, minlength=_NUM_BYTES) + 1.0
        smoothed = counts + _BACKOFF_COUNT * single / single.sum()
        self._log_probabilities: NDArray[np.float64] = np.log(smoothed / smoothed.sum(axis=1, keepdims=True))

    def nats_per_byte(self, windows: Bytes) -> float:
        """Return the mean loss of every byte but the first of each window, (windows, bytes)."""
        return float(-self._log_probabilities[windows[:, :-1], windows[:, 1:]].mean())
