"""Real models through a pipeline, none of them changed or named in the package: the oracle's bits, step after step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients, assert_same_state
from tests.zoo import models

SEED = 11
RELATIVE = 1e-6
# The oracle regroups sums as the stages do (contract 2), a plain loop does not: there these are close, not equal.
REGROUPED = {
    "gpt2": "the head is the token embedding",
    "qwen3 (tied)": "the head is the token embedding",
    "bert-mlm": "the decoder of the masked tokens is the word embedding",
    "modernbert": "the decoder of the masked tokens is the token embedding",
    "t5": "encoder, decoder and head share one embedding",
    "whisper": "the output projection is the decoder's embedding",
    "dit": "the output calls the first block's embedding of timestep and class again",
}


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("name", models.NAMES)
def test_steps_of_adamw_have_the_oracles_bits(name, num_stages):
    pytest.importorskip(models.ROWS[name].package)
    model, inputs = models.build(name), models.batch(name)
    options = {"num_microbatches": models.NUM_MICROBATCHES, "num_stages": num_stages, "loss_fn": models.loss_of(name)}
    reference = copy.deepcopy(model)
    with pl.Pipeline(model, schedule="1f1b", seed=SEED, **options) as pipe:
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (pipe, reference)]
        for step_index in range(3):
            found = pipe.step(**inputs)
            expected = sequential_step(reference, seed=SEED, step_index=step_index, **options, **inputs)
            assert_bit_equal(found, expected, f"loss of step {step_index}")
            assert_same_gradients(pipe, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(pipe, reference)
        buffers = dict(pipe.unwrap().named_buffers())
    for key, buffer in reference.named_buffers():
        assert_bit_equal(buffers[key], buffer, key)


def assert_close(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    """Within 1e-6 of the largest element, or both absent."""
    if found is None or expected is None:
        assert found is expected, what
    else:
        assert (found - expected).abs().max() <= RELATIVE * expected.abs().max(), what


@pytest.mark.parametrize("name", models.NAMES)
def test_a_loop_in_plain_torch_agrees(name):
    pytest.importorskip(models.ROWS[name].package)
    # Without dropout, whose draws a plain loop makes in another order; a traced pipeline would go on drawing.
    model = models.build(name).eval()
    reference = copy.deepcopy(model)
    for inputs in models.microbatches(name):
        (models.loss_in(reference(**inputs)) / models.NUM_MICROBATCHES).backward()
    options = {"num_microbatches": models.NUM_MICROBATCHES, "loss_fn": models.loss_of(name)}
    with pl.Pipeline(model, num_stages=3, schedule="1f1b", **options) as pipe:
        pipe.step(**models.batch(name))
        compare = assert_close if name in REGROUPED else assert_bit_equal
        expected = dict(reference.named_parameters())
        for key, parameter in pipe.named_parameters():
            compare(parameter.grad, expected[key].grad, key)


@pytest.mark.parametrize("name", models.NAMES)
def test_a_backward_in_two_halves_has_the_same_bits(name):
    pytest.importorskip(models.ROWS[name].package)
    model, inputs = models.build(name), models.batch(name)
    options = {"num_microbatches": models.NUM_MICROBATCHES, "num_stages": 3, "loss_fn": models.loss_of(name)}
    reference = copy.deepcopy(model)
    with pl.Pipeline(model, schedule="zb-h1", seed=SEED, **options) as pipe:
        found = pipe.step(**inputs)
        assert_bit_equal(found, sequential_step(reference, seed=SEED, **options, **inputs), "loss")
        assert_same_gradients(pipe, reference)
