"""bfloat16 weights, autocast and gradient scalers, as users write them."""

import copy

import pytest
import torch

import pipeloom as pl
from tests.hf import models


def pair(model, **options):
    """A pipeline and a copy of its model."""
    plain = copy.deepcopy(model.train())
    return pl.Pipeline(model, num_stages=2, num_microbatches=4, **options), plain


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_weights_in_bfloat16(grad_dtype):
    pipe, plain = pair(models.llama().to(torch.bfloat16), grad_dtype=grad_dtype)
    loss, expected = pipe.step(**models.batch()), plain(**models.batch()).loss
    torch.testing.assert_close(loss.float(), expected.detach().float(), rtol=1e-2, atol=0)
    assert {each.grad.dtype for each in pipe.parameters()} == {grad_dtype or torch.bfloat16}


def test_autocast():
    pipe, plain = pair(models.llama())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, expected = pipe.step(**models.batch()), plain(**models.batch()).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-3, atol=0)
    one, other = models.gradients(pipe), models.gradients(plain)
    assert one.keys() == other.keys()
    assert all(torch.cosine_similarity(one[name].flatten(), other[name].flatten(), 0) > 0.99 for name in one)


def test_a_gradient_scaler():
    pipe, plain = pair(models.llama())
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), pipe.optimizer(torch.optim.SGD, lr=0.1)
    loss = pipe.step(**models.batch(), loss_scale=scaler.scale(torch.ones(())))
    scaler.unscale_(optimizer)
    expected = plain(**models.batch()).loss
    expected.backward()
    models.assert_near(models.gradients(pipe), models.gradients(plain))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0


def test_a_scaler_skips_what_overflows():
    pipe, plain = pair(models.llama())
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**126), pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(**models.batch(), loss_scale=1e3 * scaler.scale(torch.ones(())))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**125
    models.assert_equal(dict(pipe.unwrap().named_parameters()), dict(plain.named_parameters()))
