"""Files that transformers writes, and models that it makes: the same values as `from_pretrained` gives."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from pipeloom.errors import CheckpointError, SplitError
from pipeloom.weights.build import build
from pipeloom.weights.match import match, places_of
from pipeloom.weights.materialise import materialise
from pipeloom.weights.stored import Weights

T = pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
FEW = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "d_model": 16,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}


def detr_config():
    backbone = T.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    own = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": backbone}
    return T.DetrConfig(**own, **FEW, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=3)


CONFIGS = {
    "gpt2": (
        T.GPT2LMHeadModel,
        T.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0),
    ),
    "llama": (T.LlamaForCausalLM, T.LlamaConfig(**SMALL)),
    "llama, tied": (T.LlamaForCausalLM, T.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "bert": (T.BertForMaskedLM, T.BertConfig(**SMALL)),
    "t5": (
        T.T5ForConditionalGeneration,
        T.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
    ),
    "mixtral": (T.MixtralForCausalLM, T.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=3)),
    "vit": (T.ViTForImageClassification, T.ViTConfig(**{**SMALL, "vocab_size": 2}, image_size=8, patch_size=4)),
    "whisper": (
        T.WhisperForConditionalGeneration,
        T.WhisperConfig(**FEW, **ENDS, vocab_size=64, num_mel_bins=8, max_source_positions=10, max_target_positions=10),
    ),
    "mamba2": (
        T.Mamba2ForCausalLM,
        T.Mamba2Config(
            num_heads=4, head_dim=8, vocab_size=64, hidden_size=16, state_size=8, num_hidden_layers=2, n_groups=1
        ),
    ),
    "detr": (T.DetrForObjectDetection, detr_config()),
}


def saved(kind, config, folder, **options):
    """A model with random values everywhere, in files, and what transformers reads from these."""
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    model.save_pretrained(folder, **options)
    return kind.from_pretrained(folder)


def made(factory, folder, **options):
    """The model that was never whole."""
    model = build(factory)
    materialise(places_of(model), match(model, Weights(folder)), "cpu", **options)
    return model


def assert_equal(model, expected):
    for held in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(each, held)(remove_duplicate=False)) for each in (model, expected))
        assert list(ours) == list(theirs)
        differing = [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
        assert differing == []
        assert len({*map(id, ours.values())}) == len({*map(id, theirs.values())})


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "10KB"}], ids=["one file", "shards"])
@pytest.mark.parametrize(("kind", "config"), CONFIGS.values(), ids=CONFIGS)
def test_model_is_that_of_from_pretrained(kind, config, options, tmp_path):
    expected = saved(kind, config, tmp_path, **options)
    assert_equal(made(partial(kind, config), tmp_path), expected)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_auto_factory_and_dtype(name, tmp_path):
    kind, config = CONFIGS[name]
    saved(kind, config, tmp_path)
    expected = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = made(partial(T.AutoModelForCausalLM.from_config, config), tmp_path, dtype=torch.bfloat16)
    assert_equal(model, expected)


def test_model_runs_as_that_of_from_pretrained(tmp_path):
    kind, config = CONFIGS["mixtral"]
    expected = saved(kind, config, tmp_path)
    tokens = torch.randint(64, (2, 5))
    model = made(partial(kind, config), tmp_path)
    assert torch.equal(model.eval()(tokens).logits, expected.eval()(tokens).logits)


@pytest.mark.parametrize("name", ["llama", "bert", "mixtral"])
def test_base_model_is_read_from_a_file_with_a_head(name, tmp_path):
    kind, config = CONFIGS[name]
    saved(kind, config, tmp_path)
    expected = (
        T.AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)
        if name == "bert"
        else T.AutoModel.from_pretrained(tmp_path)
    )
    factory = partial(type(expected), config, **({"add_pooling_layer": False} if name == "bert" else {}))
    assert_equal(made(factory, tmp_path), expected)


@pytest.mark.parametrize("name", ["vit", "mixtral", "detr"])
def test_file_with_the_names_of_today_is_read_too(name, tmp_path):
    kind, config = CONFIGS[name]
    expected = saved(kind, config, tmp_path)
    tensors = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal(made(partial(kind, config), tmp_path), expected)


def test_tied_head_is_read_from_a_file_without(tmp_path):
    kind, config = CONFIGS["gpt2"]
    saved(T.GPT2Model, config, tmp_path)
    model = made(partial(kind, config), tmp_path)
    assert_equal(model, kind.from_pretrained(tmp_path))
    assert model.lm_head.weight is model.transformer.wte.weight


def test_head_that_is_not_stored_is_missing(tmp_path):
    kind, config = CONFIGS["llama"]
    saved(T.LlamaModel, config, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"no tensor for 1 of the model's parameters and buffers: 'lm_head\.weight'"
    ):
        match(build(partial(kind, config)), Weights(tmp_path))


def test_a_factory_that_loads_the_weights_itself_is_refused(tmp_path):
    """What a user of Hugging Face tries first. transformers empties rotary frequencies, and filled them no more."""
    kind, config = CONFIGS["llama"]
    saved(kind, config, tmp_path)
    with pytest.raises(SplitError, match=r"lost them.*: model\.rotary_emb\.inv_freq(.|\n)*from_config"):
        build(partial(kind.from_pretrained, tmp_path))


def test_weights_of_another_configuration_are_refused(tmp_path):
    kind, config = CONFIGS["mixtral"]
    saved(kind, config, tmp_path)
    other = T.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=4)
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj' has shape \[4, 64, 16\] in the model, \[3, 64, 16\] as stored"
    ):
        match(build(partial(kind, other)), Weights(tmp_path))


LARGE = """
import resource
from functools import partial
from transformers import AutoModelForCausalLM, LlamaConfig
from pipeloom.weights.build import build

config = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    vocab_size=128256,
)
model = build(partial(AutoModelForCausalLM.from_config, config))
print(sum(parameter.numel() for parameter in model.parameters()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_seventy_billion_parameters_fit_anywhere():
    ran = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    num_parameters, peak_kib = map(int, ran.stdout.split())
    assert num_parameters == 70_553_706_496
    assert peak_kib < 1 << 20
