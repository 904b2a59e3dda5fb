"""Models of Hugging Face in halves, with their own checkpoints too: bits of all gradients over three micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeloom.halves import Halves
from tests.halves.both import draw, same_gradients

transformers: Any = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WORDS: dict[str, Any] = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=32, **WORDS)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SMALL, **WORDS))


def gemma2() -> nn.Module:
    """Norms scale by one and their weight, which is a weight that is computed."""
    config = transformers.Gemma2Config(num_key_value_heads=2, head_dim=16, **SMALL, **WORDS)
    return transformers.Gemma2ForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SMALL, **WORDS)
    return transformers.MixtralForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=100, **SMALL))


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=100, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **SMALL))


def loss_of(model: nn.Module, scale: float) -> Any:
    if "ViT" in type(model).__name__:
        return model(draw(2, 3, 32, 32) * scale, labels=torch.tensor([0, 1])).loss
    ids = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, labels=ids).loss * scale


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_reentrant", [None, False, True], ids=["plain", "hooks", "reentrant"])
@pytest.mark.parametrize("make", [gpt2, llama, gemma2, mixtral, bert, t5, vit], ids=lambda each: each.__name__)
def test_models(make: Callable[[], nn.Module], is_reentrant: bool | None) -> None:
    torch.manual_seed(0)
    model: Any = make().train()
    if is_reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
        model.enable_input_require_grads()
    whole, late = copy.deepcopy(model), []
    for microbatch in range(3):
        torch.manual_seed(microbatch)
        loss_of(whole, 1 / (1 + microbatch)).backward()
        halves = Halves()
        torch.manual_seed(microbatch)
        with halves.forward():
            loss = loss_of(model, 1 / (1 + microbatch))
        with halves.input_gradients():
            loss.backward()
        late.append(halves)
    assert all(each.num_waiting >= 11 for each in late)
    for each in late:
        each.weight_gradients()
    same_gradients(model, whole)
