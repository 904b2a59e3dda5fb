"""Windows of text in an order that is a function of (seed, position).

A shuffling loader with workers and generators of its own has state in many places, and a resumed run repeats
or skips data. Here the order of an epoch follows from the seed and the epoch's number alone, so one integer
is the whole state.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeloom.train.corpus import Bytes


class Batches:
    """An endless iterator of (inputs, targets), each an int64 tensor (batch_size, sequence_length).

    Targets are the inputs moved by one byte. An epoch takes windows side by side from a random phase,
    shuffled; a batch may straddle two epochs.

    Attributes:
        position: windows handed out so far; set it to continue from there.
    """

    def __init__(self, text: Bytes, *, batch_size: int, sequence_length: int, seed: int) -> None:
        self.position = 0
        self._text = text
        self._batch_size = batch_size
        self._sequence_length = sequence_length
        self._seed = seed
        self._num_windows = max(1, (len(text) - sequence_length) // sequence_length)
        self._epoch = -1
        self._starts: NDArray[np.int64] = np.empty(0, np.int64)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        starts = [self._start(self.position + offset) for offset in range(self._batch_size)]
        self.position += self._batch_size
        return as_inputs_and_targets(windows_at(self._text, starts, self._sequence_length))

    def _start(self, position: int) -> int:
        epoch, index = divmod(position, self._num_windows)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._shuffled(epoch)
        return int(self._starts[index])

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        rng = np.random.default_rng([self._seed, epoch])
        slack = len(self._text) - 1 - self._num_windows * self._sequence_length
        phase = int(rng.integers(min(slack + 1, self._sequence_length)))
        return phase + self._sequence_length * rng.permutation(self._num_windows)


def held_out_windows(text: Bytes, num_windows: int, sequence_length: int) -> Bytes:
    """Return windows spread evenly over the text, (windows, sequence_length + 1); fewer if it is short."""
    fitting = max(1, (len(text) - 1) // sequence_length)
    starts = np.linspace(0, len(text) - 1 - sequence_length, min(num_windows, fitting)).astype(np.int64)
    return windows_at(text, starts.tolist(), sequence_length)


def windows_at(text: Bytes, starts: list[int], sequence_length: int) -> Bytes:
    """Return the windows of sequence_length + 1 bytes that begin at ``starts``, (windows, bytes)."""
    return text[np.asarray(starts)[:, None] + np.arange(sequence_length + 1)]


def as_inputs_and_targets(windows: Bytes) -> tuple[Tensor, Tensor]:
    """Return all but the last byte, and all but the first, of each window as int64 (windows, bytes)."""
    tensor = torch.from_numpy(windows.astype(np.int64))
    return tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous()
