"""Activation checkpointing of transformers, before and after the pipeline is made: the same bits as without."""

from collections import Counter

import pytest

import pipeloom as pl
from tests.hf import models
from tests.hf.test_adapters import with_lora

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*deprecated:FutureWarning")
KINDS = {
    "llama": models.llama,
    "llama, tied": models.tied,
    "gpt2": models.gpt2,
    "lora": lambda: with_lora(models.llama(), lora_dropout=0.3),
}


def stepped(model, enable_before=None, enable_after=None):
    """Loss and gradients of a pipeline's second step."""
    if enable_before is not None:
        model.gradient_checkpointing_enable({"use_reentrant": enable_before})
    pipe = pl.Pipeline(model.train(), num_stages=2, num_microbatches=4)
    pipe.step(**models.batch())
    pipe.zero_grad()
    if enable_after is not None:
        model.gradient_checkpointing_enable({"use_reentrant": enable_after})
    return pipe.step(**models.batch()), models.gradients(pipe)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("when", ["enable_before", "enable_after"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_stay(kind, when, use_reentrant):
    loss, gradients = stepped(KINDS[kind](), **{when: use_reentrant})
    expected, expected_gradients = stepped(KINDS[kind]())
    assert loss == expected
    models.assert_equal(gradients, expected_gradients)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_layers_do_run_again(use_reentrant):
    model, calls = models.llama(), []
    model.model.layers[3].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    stepped(model, use_reentrant)
    assert len(calls) == 2 * 2 * 4  # steps, forward and again, micro-batches


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_switched_off_again(use_reentrant):
    model = models.llama()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    pipe = pl.Pipeline(model.train(), num_stages=2, num_microbatches=4)
    pipe.step(**models.batch())
    pipe.zero_grad()
    model.gradient_checkpointing_disable()
    calls = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    pipe.step(**models.batch())
    assert len(calls) == 4
    models.assert_equal(models.gradients(pipe), stepped(models.llama())[1])


def test_together_with_recompute():
    model = models.llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4, recompute=True)
    loss = pipe.step(**models.batch())
    expected, gradients = stepped(models.llama())
    assert loss == expected
    models.assert_equal(models.gradients(pipe), gradients)


NAMED = {"llama": "model.layers.*", "gpt2": "*.attn", "t5": "*.block.*", "bert": ["*.layer.0", "*.attention"]}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", NAMED)
def test_named_modules_recompute(name, schedule):
    """Blocks and parts of blocks."""
    found = []
    for recompute in (False, NAMED[name]):
        model = getattr(models, name)().train()
        calls = Counter()
        for inner, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, inner=inner, calls=calls: calls.update([inner]))
        pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4, schedule=schedule, recompute=recompute)
        found.append((pipe.step(**models.batch()), models.gradients(pipe), calls))
        pipe.close()
    (loss, gradients, calls), (again, same, more) = found
    assert loss == again
    models.assert_equal(gradients, same)
    assert more.total() > calls.total()
    assert all(calls[inner] <= more[inner] <= 2 * calls[inner] for inner in calls)


def test_named_modules_inside_a_checkpoint_of_the_models_own():
    """The layer's checkpoint ran its modules again without ours, and torch found other tensors than in the forward."""
    model = models.llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4, recompute="model.layers.*.mlp")
    loss = pipe.step(**models.batch())
    expected, gradients = stepped(models.llama())
    assert loss == expected
    models.assert_equal(models.gradients(pipe), gradients)
