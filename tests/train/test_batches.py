"""Windows: all of the text, in an order that the seed and the position give."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.train.batches import Batches, as_inputs_and_targets, held_out_windows

TEXT = np.arange(250, dtype=np.uint8)


def batches(text: np.ndarray = TEXT, *, batch_size: int = 4, sequence_length: int = 8, seed: int = 0) -> Batches:
    return Batches(text, batch_size=batch_size, sequence_length=sequence_length, seed=seed)


def test_targets_are_the_next_bytes() -> None:
    inputs, targets = next(batches())
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


@given(
    num_bytes=st.integers(2, 400),
    sequence_length=st.integers(1, 40),
    batch_size=st.integers(1, 7),
    seed=st.integers(0, 2**63 - 1),
)
def test_windows_stay_inside_the_text(num_bytes: int, sequence_length: int, batch_size: int, seed: int) -> None:
    text = (np.arange(num_bytes) % 256).astype(np.uint8)
    sequence_length = min(sequence_length, num_bytes - 1)
    iterator = batches(text, batch_size=batch_size, sequence_length=sequence_length, seed=seed)
    for _ in range(5):
        inputs, targets = next(iterator)
        assert inputs.shape == (batch_size, sequence_length)
        assert torch.equal((inputs + 1) % 256, targets)


def test_an_epoch_has_every_window_once() -> None:
    iterator = batches(batch_size=1)
    num_windows = (250 - 8) // 8
    starts = sorted(int(next(iterator)[0][0, 0]) for _ in range(num_windows))
    assert set(np.diff(starts)) == {8}
    assert starts[-1] + 8 < 250


def test_epochs_differ_in_order_and_phase() -> None:
    iterator = batches(batch_size=30)
    first, second = next(iterator)[0], next(iterator)[0]
    assert not torch.equal(first, second)
    assert {int(first[i, 0]) % 8 for i in range(30)} != {int(second[i, 0]) % 8 for i in range(30)}


def test_order_follows_from_the_seed() -> None:
    assert torch.equal(next(batches(seed=1))[0], next(batches(seed=1))[0])
    assert not torch.equal(next(batches(seed=1))[0], next(batches(seed=2))[0])


@pytest.mark.parametrize("num_before", [0, 1, 5, 7, 8, 23])
def test_position_continues_where_it_was(num_before: int) -> None:
    straight, resumed = batches(), batches()
    for _ in range(num_before):
        next(straight)
    resumed.position = straight.position
    for _ in range(10):
        assert torch.equal(next(straight)[0], next(resumed)[0])
    assert straight.position == resumed.position == 4 * (num_before + 10)


def test_batch_size_does_not_change_the_order() -> None:
    small, large = batches(batch_size=2), batches(batch_size=6)
    assert torch.equal(torch.cat([next(small)[0] for _ in range(3)]), next(large)[0])


def test_text_of_one_window_repeats() -> None:
    iterator = batches(TEXT[:9], batch_size=3)
    inputs, targets = next(iterator)
    assert inputs.tolist() == [list(range(8))] * 3
    assert targets.tolist() == [list(range(1, 9))] * 3


def test_held_out_windows_spread_from_end_to_end() -> None:
    windows = held_out_windows(TEXT, 3, 9)
    assert windows.shape == (3, 10)
    assert windows[:, 0].tolist() == [0, 120, 240]
    assert windows[-1, -1] == 249


@pytest.mark.parametrize(("num_bytes", "num_windows"), [(11, 1), (19, 1), (22, 2), (250, 24)])
def test_short_text_gives_fewer_windows(num_bytes: int, num_windows: int) -> None:
    assert held_out_windows(TEXT[:num_bytes], 1000, 10).shape == (num_windows, 11)


def test_inputs_and_targets_own_their_memory() -> None:
    inputs, targets = as_inputs_and_targets(np.array([[1, 2, 3]], np.uint8))
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert (inputs.tolist(), targets.tolist()) == ([[1, 2]], [[2, 3]])


@given(num_bytes=st.integers(17, 400), seed=st.integers(0, 2**32))
def test_an_epoch_begins_within_the_first_window(num_bytes: int, seed: int) -> None:
    """A later phase would leave bytes at the start out more often than others."""
    numbered = batches(np.arange(num_bytes, dtype=np.int64), sequence_length=8, seed=seed, batch_size=1)
    starts = [int(next(numbered)[0][0, 0]) for _ in range((num_bytes - 8) // 8)]
    assert min(starts) < 8
    assert sorted(starts) == list(range(min(starts), max(starts) + 1, 8))
