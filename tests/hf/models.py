"""Small models of Hugging Face's, batches whose micro-batches count unevenly, and what gradients they get."""

import torch
import transformers as T

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def llama(**options):
    torch.manual_seed(0)
    return T.AutoModelForCausalLM.from_config(T.LlamaConfig(**SMALL, num_key_value_heads=1, **options))


def tied():
    return llama(tie_word_embeddings=True)


def gpt2():
    torch.manual_seed(0)
    config = T.GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=4, n_head=2, **ENDS, **STILL)
    return T.AutoModelForCausalLM.from_config(config)


def t5():
    torch.manual_seed(0)
    return T.AutoModelForSeq2SeqLM.from_config(T.T5Config(**T5, decoder_start_token_id=0))


def bert():
    torch.manual_seed(0)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return T.AutoModelForMaskedLM.from_config(T.BertConfig(**SMALL, **still))


def albert():
    """One layer, called four times."""
    torch.manual_seed(0)
    options = {"vocab_size": 64, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 64}
    config = T.AlbertConfig(**options, num_hidden_layers=4, num_attention_heads=4, hidden_dropout_prob=0.0,
                            attention_probs_dropout_prob=0.0)  # fmt: skip
    return T.AlbertForMaskedLM(config)


def batch(num_rows=8, length=12):
    """Rows that count from 1 to all of their labels; the sixth pair has none but two."""
    ids = torch.randint(64, (num_rows, length), generator=torch.Generator().manual_seed(1))
    kept = torch.tensor([1 + (5 * row) % length for row in range(num_rows)])
    kept[4:6] = 1
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(length) > kept[:, None], -100)}


def gradients(model):
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_equal(one, other):
    """To the bit, and the same parameters have any."""
    assert one.keys() == other.keys()
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def assert_near(one, other):
    """Up to the order of sums: 1e-6 of each gradient's largest element; keys' biases have none but by rounding."""
    assert one.keys() == other.keys()
    floor = 1e-3 * max(float(each.abs().max()) for each in other.values())
    worst = max(float((one[name] - other[name]).abs().max() / max(other[name].abs().max(), floor)) for name in one)
    assert worst < 1e-6
