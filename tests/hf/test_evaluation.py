"""Evaluation gives what the plain model gives, without a cache; to generate is for what unwrap() gives back."""

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.batch.caches import without_cache
from tests.hf import models

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
KINDS = {
    "llama": models.llama,
    "llama, tied": models.tied,
    "gpt2": models.gpt2,
    "t5": models.t5,
    "bert": models.bert,
    "albert": models.albert,
}


def pipeline(model, num_microbatches=4):
    return pl.Pipeline(model, num_stages=2, num_microbatches=num_microbatches)


@torch.no_grad()
def plainly(model, **inputs):
    return copy.deepcopy(model).eval()(**inputs, use_cache=False)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("kind", ["llama", "llama, tied", "gpt2"])
def test_logits_are_the_plain_models(kind, num_microbatches):
    model, ids = KINDS[kind](), models.batch()["input_ids"]
    expected = plainly(model, input_ids=ids)
    output = pipeline(model, num_microbatches).eval()(input_ids=ids)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-6, atol=1e-6)
    assert type(output) is type(expected)
    assert list(output) == ["logits"]


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_logits_with_labels_after_a_step(kind):
    model, batch = KINDS[kind]().train(), models.batch()
    pipe = pipeline(model)
    pipe.step(**batch)
    output = pipe.eval()(**batch)
    with torch.no_grad():
        expected = model(**batch)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-6, atol=1e-6)
    assert not output.logits.requires_grad


def test_dropout_follows_the_mode():
    torch.manual_seed(0)
    model, ids = models.llama(attention_dropout=0.5), models.batch()["input_ids"]
    pipe = pipeline(model)
    first, same = pipe.eval()(input_ids=ids).logits, pipe(input_ids=ids).logits
    assert torch.equal(first, same)
    assert not torch.equal(first, pipe.train()(input_ids=ids).logits)


def test_hidden_states_of_all_stages():
    model, ids = models.llama(), models.batch()["input_ids"]
    expected = plainly(model, input_ids=ids, output_hidden_states=True)
    output = pipeline(model).eval()(input_ids=ids, output_hidden_states=True)
    torch.testing.assert_close(output.hidden_states, expected.hidden_states, rtol=1e-6, atol=1e-6)
    assert len(output.hidden_states) == 5


@pytest.mark.parametrize("first", ["pipeline", "model", "neither"])
@pytest.mark.parametrize("kind", ["llama", "albert"])
def test_hidden_states_come_once_whoever_ran_first(kind, first):
    """transformers hooks a model's layers when outputs are first asked for. A model that ran by itself after it was
    cut had the hooks of both, and its hidden states came twice; `verify=True` runs it so before every first step."""
    model, ids = KINDS[kind](), models.batch()["input_ids"]
    expected = plainly(model, input_ids=ids, output_hidden_states=True).hidden_states
    pipe = pl.Pipeline(model, num_stages=3, num_microbatches=2).eval()
    if first == "pipeline":
        pipe(input_ids=ids, output_hidden_states=True)
    if first != "neither":
        with torch.no_grad():
            alone = model(input_ids=ids, output_hidden_states=True).hidden_states
        torch.testing.assert_close(alone, expected, rtol=1e-6, atol=1e-6)
    for _ in range(2):
        found = pipe(input_ids=ids, output_hidden_states=True).hidden_states
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama, tied", "t5"])
def test_generation_after_unwrap(kind):
    model, ids = KINDS[kind](), models.batch()["input_ids"]
    plain, pipe = copy.deepcopy(model).eval(), pipeline(model)
    pipe.step(**models.batch())
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    found = pipe.unwrap().eval().generate(ids, **options)
    assert torch.equal(found, plain.generate(ids, **options))


def test_greedy_decoding_through_the_pipeline():
    model, tokens = models.tied(), models.batch()["input_ids"][:1]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(tokens), "eos_token_id": 99}
    expected = copy.deepcopy(model).eval().generate(tokens, **options)
    pipe = pipeline(model).eval()
    for _ in range(6):
        tokens = torch.cat((tokens, pipe(input_ids=tokens).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(tokens, expected)


# The cache.


class Cached(nn.Module):
    """Takes the switch, and says what came."""

    def forward(self, x, use_cache=True, past_key_values=None):
        return x, use_cache


@pytest.mark.parametrize("given", [{}, {"use_cache": None}, {"use_cache": False}, {"past_key_values": None}], ids=str)
def test_the_cache_is_switched_off(given):
    assert without_cache(Cached(), (torch.ones(2),), given)["use_cache"] is False
    assert without_cache(nn.Linear(2, 2), (torch.ones(2),), {}) == {}


@pytest.mark.parametrize("position", [False, None])
def test_a_switch_given_by_position_stays(position):
    assert without_cache(Cached(), (torch.ones(2), position), {}) == {}


def test_through_the_wrapper_of_peft():
    wrapped = peft.PeftModel(models.llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert without_cache(wrapped, (), {}) == {"use_cache": False}
    assert without_cache([models.llama()], (), {"use_cache": True}) == {"use_cache": True}  # a list's own business


@pytest.mark.parametrize(
    ("given", "text"), [({"use_cache": True}, "use_cache=True"), ({"past_key_values": ()}, "past_key_values=a tuple")]
)
@pytest.mark.parametrize("call", ["step", "__call__"])
def test_asking_for_a_cache_is_refused(call, given, text):
    pipe = pipeline(models.llama())
    with pytest.raises(pl.errors.BatchError, match=rf"{text} was given; every stage would.*\n.*unwrap\(\)"):
        getattr(pipe, call)(**models.batch(), **given)
