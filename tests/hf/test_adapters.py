"""LoRA by PEFT: on the model before it is pipelined, after, merged again; and other frozen weights."""

import copy

import pytest
import torch

import pipeloom as pl
from pipeloom.testing import sequential_step
from tests.hf import models

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def config(**options):
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", **settings)


def with_lora(model, **options):
    return peft.get_peft_model(model, config(**options)).train()


def check(model, **options):
    """Step a model in two stages and whole; the pipeline that stepped."""
    plain = copy.deepcopy(model)
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4, **options)
    pipe.step(**models.batch())
    plain(**models.batch()).loss.backward()
    models.assert_near(models.gradients(pipe), models.gradients(plain))
    return pipe


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_adapters_made_before(options):
    pipe = check(with_lora(models.llama(), **options))
    trained = models.gradients(pipe).keys()
    assert trained == {name for name, each in pipe.named_parameters() if each.requires_grad}
    assert all("lora_" in name or "modules_to_save" in name for name in trained)


@pytest.mark.parametrize("num_virtual_tokens", [1, 3])
def test_learned_tokens_in_front(num_virtual_tokens):
    kind = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=num_virtual_tokens)
    pipe = check(peft.get_peft_model(models.llama(), kind))
    assert len(models.gradients(pipe)) == 1


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_a_prefix_of_keys_and_values():
    kind = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    pipe = check(peft.get_peft_model(models.llama(), kind))
    assert models.gradients(pipe)


def test_adapters_made_after_unwrap():
    pipe = pl.Pipeline(models.llama().train(), num_stages=2, num_microbatches=4)
    pipe.step(**models.batch())
    pipe.zero_grad()
    again = check(with_lora(pipe.unwrap()))
    assert all("lora_" in name for name in models.gradients(again))


def test_adapters_put_into_the_model_between_steps():
    """What PEFT puts into a layer runs with it: the layer is the unit, and stays the same."""
    model = models.llama().train()
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4)
    pipe.step(**models.batch())
    pipe.zero_grad()
    peft.inject_adapter_in_model(config(), model)
    plain = copy.deepcopy(model)
    pipe.step(**models.batch())
    plain(**models.batch()).loss.backward()
    models.assert_near(models.gradients(pipe), models.gradients(plain))
    assert all("lora_" in name for name in models.gradients(pipe))


def test_an_adapter_around_a_whole_unit_needs_a_new_pipeline():
    model = models.llama().train()
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4)
    pipe.step(**models.batch())
    peft.inject_adapter_in_model(config(target_modules=["lm_head"]), model)
    with pytest.raises(pl.errors.RuntimeStateError, match=r"lm_head of the model were replaced.*\n.*make a new one"):
        pipe.step(**models.batch())


def test_dropout_of_adapters_is_the_oracles():
    model = with_lora(models.llama(), lora_dropout=0.5)
    plain, pipe = copy.deepcopy(model), pl.Pipeline(model, num_stages=2, num_microbatches=4)
    loss = pipe.step(**models.batch())
    assert loss == sequential_step(plain, num_stages=2, num_microbatches=4, **models.batch())
    models.assert_equal(models.gradients(pipe), models.gradients(plain))


@pytest.mark.parametrize("is_chosen", [True, False])
def test_an_optimizer_moves_adapters_and_nothing_else(is_chosen):
    model = with_lora(models.llama())
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4)
    chosen = [each for each in pipe.parameters() if each.requires_grad]
    every = pipe.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    optimizer = torch.optim.AdamW(chosen, lr=0.1, weight_decay=0.5) if is_chosen else every
    pipe.step(**models.batch())
    optimizer.step()
    moved = {name for name, each in pipe.named_parameters() if not torch.equal(each, before[name])}
    assert moved == {name for name in before if "lora_" in name}


def test_merged_into_the_model_after_unwrap():
    pipe = check(with_lora(models.llama()))
    pipe.optimizer(torch.optim.SGD, lr=0.1).step()
    model, ids = pipe.unwrap().eval(), models.batch()["input_ids"]
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, adapted, rtol=1e-5, atol=1e-6)
    assert not any("lora" in name for name in merged.state_dict())


def test_adapters_switched_off_for_an_evaluation():
    model, ids = with_lora(models.llama()), models.batch()["input_ids"]
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4).eval()
    with model.disable_adapter():
        off = pipe(input_ids=ids).logits
    assert torch.equal(off, models.llama().eval()(input_ids=ids).logits)
    assert not torch.equal(off, pipe(input_ids=ids).logits)


@pytest.mark.parametrize("kept", ["layers.0", "layers.3", "lm_head", "embed_tokens"])
def test_frozen_weights_at_either_end(kept):
    model = models.llama().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(kept in name)
    pipe = check(model)
    assert all(kept in name for name in models.gradients(pipe))
