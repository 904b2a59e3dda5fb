"""The held-out loss and its baseline are of the same bytes, and right."""

import contextlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeloom import Pipeline
from pipeloom.errors import ConfigError
from pipeloom.train.held_out import HeldOut, bigram_loss, cross_entropy, next_byte_loss

TEXT = np.frombuffer(b"abracadabra" * 20, np.uint8)
WINDOWS = np.stack([TEXT[start : start + 12] for start in range(0, 140, 7)])


def byte_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(256, 8), nn.Dropout(0.5), nn.Linear(8, 256))


def pipeline_of(model: nn.Module) -> Pipeline:
    return Pipeline(model, num_stages=2, num_microbatches=2, loss_fn=next_byte_loss)


def test_bigram_knows_what_follows() -> None:
    alternating = np.frombuffer(b"xy" * 5000, np.uint8)
    assert bigram_loss(alternating, alternating[None, :200]) < 0.01
    assert bigram_loss(alternating, np.frombuffer(b"xx", np.uint8)[None]) > 5


def test_bigram_of_noise_is_uniform() -> None:
    noise = np.random.default_rng(0).integers(256, size=2_000_000).astype(np.uint8)
    assert bigram_loss(noise, noise[None, :1_000_000]) == pytest.approx(math.log(256), abs=0.02)


@given(st.binary(min_size=2, max_size=50), st.integers(0, 255))
def test_bigram_is_a_distribution(text: bytes, before: int) -> None:
    windows = np.stack([np.full(256, before), np.arange(256)], axis=1).astype(np.uint8)
    losses = [bigram_loss(np.frombuffer(text, np.uint8), window[None]) for window in windows]
    assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1)
    assert max(losses) < 20


def test_bigram_beats_adding_one_to_every_pair() -> None:
    training, windows = TEXT[:110], WINDOWS
    counts = np.bincount(training[:-1].astype(int) * 256 + training[1:], minlength=65536).reshape(256, 256) + 1.0
    add_one = -np.log((counts / counts.sum(1, keepdims=True))[windows[:, :-1], windows[:, 1:]]).mean()
    assert bigram_loss(training, windows) < add_one


@pytest.mark.parametrize("num_windows", [1, 20, 64, 65, 150])
def test_loss_is_the_mean_over_all_bytes(num_windows: int) -> None:
    windows = np.resize(WINDOWS, (num_windows, 12))
    model = byte_model()
    with pipeline_of(model) as pipe:
        record = HeldOut(windows, 3.0, contextlib.nullcontext).evaluate(pipe, step=7)
    tensor = torch.from_numpy(windows.astype(np.int64))
    expected = next_byte_loss(model.eval()(tensor[:, :-1]), tensor[:, 1:])
    assert record.held_out_loss == pytest.approx(expected.item(), rel=1e-5)
    assert (record.step, record.bigram_loss, record.margin) == (7, 3.0, 3.0 - record.held_out_loss)


def test_evaluation_changes_nothing() -> None:
    model = byte_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pipeline_of(model) as pipe:
        held_out = HeldOut(WINDOWS, 3.0, contextlib.nullcontext)
        assert held_out.evaluate(pipe, 0) == held_out.evaluate(pipe, 0)
        assert pipe.step_index == 0
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_evaluation_runs_in_the_given_precision() -> None:
    with pipeline_of(byte_model()) as pipe:
        full = HeldOut(WINDOWS, 3.0, contextlib.nullcontext).evaluate(pipe, 0)
        half = HeldOut(WINDOWS, 3.0, lambda: torch.autocast("cpu", dtype=torch.bfloat16)).evaluate(pipe, 0)
    assert half.held_out_loss != full.held_out_loss
    assert half.held_out_loss == pytest.approx(full.held_out_loss, rel=1e-2)


@pytest.mark.parametrize(
    ("logits", "given_shape"),
    [
        (torch.zeros(2, 3, 255), r"\(2, 3, 255\)"),
        (torch.zeros(2, 256), r"\(2, 256\)"),
        (torch.zeros(6, 256), r"\(6, 256\)"),
        ({"logits": torch.zeros(2, 3, 256)}, "dict"),
    ],
)
def test_other_output_is_refused_with_both_shapes(logits: object, given_shape: str) -> None:
    with pytest.raises(ConfigError, match=rf"the model returned {given_shape}; .* of shape \(2, 3, 256\) are needed"):
        next_byte_loss(logits, torch.zeros(2, 3, dtype=torch.int64))


def test_half_precision_logits_are_scored_in_float32() -> None:
    logits, targets = torch.randn(2, 3, 256).bfloat16(), torch.randint(256, (2, 3))
    loss = cross_entropy(logits, targets, reduction="sum")
    assert loss.dtype == torch.float32
    assert torch.equal(loss, cross_entropy(logits.float(), targets, reduction="sum"))
