"""Labels with −100, unevenly many per micro-batch: the token mean of the whole batch (the bug of 2024)."""

import copy

import pytest
import torch

import pipeloom as pl
from tests.hf import models

KINDS = {"llama": models.llama, "llama, tied": models.tied, "gpt2": models.gpt2, "t5": models.t5, "bert": models.bert}


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_one_forward_of_the_whole_batch(kind, num_stages):
    model = KINDS[kind]().train()
    plain, batch = copy.deepcopy(model), models.batch()
    pipe = pl.Pipeline(model, num_stages=num_stages, num_microbatches=4)
    loss = pipe.step(**batch)
    expected = plain(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    models.assert_near(models.gradients(pipe), models.gradients(plain))


def test_the_micro_batches_do_count_unevenly():
    counts = (models.batch()["labels"][:, 1:] != -100).sum(1).view(4, 2).sum(1)
    assert counts.tolist() == [7, 15, 2, 18]


def test_a_micro_batch_without_labels_weighs_nothing():
    model, batch = models.llama().train(), models.batch()
    batch["labels"][2:4] = -100
    plain = copy.deepcopy(model)
    loss = pl.Pipeline(model, num_stages=2, num_microbatches=4).step(**batch)
    torch.testing.assert_close(loss, plain(**batch).loss.detach(), rtol=1e-6, atol=0)
    assert loss.isfinite()


def test_padding_on_either_side_takes_its_own_way_per_micro_batch():
    model, batch = models.llama().train(), models.batch()
    mask = torch.ones_like(batch["input_ids"])
    mask[2, :5], mask[5, 7:] = 0, 0
    plain = copy.deepcopy(model)
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4)
    loss = pipe.step(**batch, attention_mask=mask)
    expected = plain(**batch, attention_mask=mask).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    models.assert_near(models.gradients(pipe), models.gradients(plain))


@pytest.mark.parametrize("length", [3, 9, 20])
def test_another_length_needs_nothing_from_the_user(length):
    model = models.llama().train()
    plain, pipe = copy.deepcopy(model), pl.Pipeline(model, num_stages=2, num_microbatches=4)
    pipe.step(**models.batch())
    shorter = models.batch(num_rows=6, length=length)
    torch.testing.assert_close(pipe.step(**shorter), plain(**shorter).loss.detach(), rtol=1e-6, atol=0)
    assert pipe.step_index == 2
