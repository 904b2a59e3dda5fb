"""More architectures, each cut once: what one model of a kind taught has to hold for its relatives."""

from __future__ import annotations

import copy

import pytest
import torch

import pipeloom as pl
from pipeloom.chance import key_draws
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients, assert_same_state
from tests.zoo import models

SEED = 11


def test_no_name_is_given_twice():
    assert len(models.ROWS) == len(models.NAMES) + len(models.MORE_NAMES)
    assert len(models.MORE_NAMES) >= 60


@pytest.fixture(autouse=True)
def keyed_draws():
    """wav2vec 2.0 masks by numpy, and BigBird chooses its blocks so."""
    key_draws()
    yield
    key_draws(False)


@pytest.mark.parametrize("name", models.MORE_NAMES)
def test_two_steps_have_the_oracles_bits(name):
    pytest.importorskip("timm")  # in the zoo's environment only: the thirty stand for them elsewhere
    pytest.importorskip(models.ROWS[name].package)
    model, inputs = models.build(name), models.batch(name)
    options = {"num_microbatches": models.NUM_MICROBATCHES, "num_stages": 3, "loss_fn": models.loss_of(name)}
    reference = copy.deepcopy(model)
    with pl.Pipeline(model, schedule="1f1b", seed=SEED, **options) as pipe:
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (pipe, reference)]
        for step_index in range(2):
            expected = sequential_step(reference, seed=SEED, step_index=step_index, **options, **inputs)
            assert_bit_equal(pipe.step(**inputs), expected, f"loss of step {step_index}")
            assert_same_gradients(pipe, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(pipe, reference)
