"""`pipeloom.split`: names and figures of a cut, checked against what is known of the model by other ways."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import pipeloom as pl
from pipeloom.errors import SplitError
from pipeloom.outline.outline import CrossingValue, SharedParameter, in_bytes, in_flops
from pipeloom.splitting import split as split_model


class Skips(nn.Module):
    """The first layer's output skips the second stage."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.first = nn.Linear(4, 4)
        self.second = nn.BatchNorm1d(4)
        self.third = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.ones(2, 4))

    def forward(self, x, is_more=True):
        a = self.first(x)
        b = self.second(a) + self.token
        return {"out": self.third(b * self.scale) + a, "is_more": is_more}


class ConvNet(nn.Module):
    """A stem, stages of residual blocks, a head: as the image models of timm are built."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.stages = nn.Sequential(*(nn.Sequential(Block(8), Block(8)) for _ in range(3)))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.conv2(torch.relu(self.norm1(self.conv1(x)))) + x)


IMAGES = (torch.zeros(2, 3, 16, 16),)
TOKENS = {"input_ids": torch.zeros(2, 6, dtype=torch.long)}


def llama(num_layers=6):
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=num_layers, num_attention_heads=2,
                    vocab_size=50, tie_word_embeddings=True)
    )  # fmt: skip


def t5():
    return T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=50))


def chain():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def skips(**options):
    return pl.split(Skips(), (torch.zeros(2, 4),), **options)


def test_stages_hold_what_their_units_hold():
    first, second, third = skips(cuts=["second", "third"]).stages
    assert [each.units for each in (first, second, third)] == [("first",), ("second",), ("third",)]
    assert [each.num_parameters for each in (first, second, third)] == [20, 8 + 4, 16]
    assert second.glue_parameters == ("token",)
    assert (second.num_buffers, second.buffer_bytes) == (9, 4 * 8 + 8)


def test_values_go_straight_to_who_uses_them():
    outline = skips(cuts=["second", "third"])
    assert outline.values == (
        CrossingValue("first", 0, (1, 2), (2, 4), "float32", 32, needs_grad=True),
        CrossingValue("mul in Skips", 1, (2,), (2, 4), "float32", 32, needs_grad=True),
    )
    assert [each.receives for each in outline.stages] == [(), ((0, 32),), ((0, 32), (1, 32))]
    assert [each.sends for each in outline.stages] == [((1, 32), (2, 32)), ((2, 32),), ()]


def test_glue_is_listed_with_its_stage():
    glue = skips(cuts=["second", "third"]).glue
    assert [(each.what, each.module, each.stage) for each in glue] == [("add", "", 1), ("mul", "", 1), ("add", "", 2)]


def test_buffers_of_no_unit_are_everywhere():
    outline = skips(num_stages=2)
    assert (outline.num_buffers, outline.everywhere_buffer_bytes) == (9 + 8, 8 * 4)
    assert "72 B of buffers, 32 B of them in every stage" in str(outline)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_sums_over_stages_are_those_of_the_model(num_stages):
    model = ConvNet()
    outline = pl.split(model, IMAGES, num_stages=num_stages)
    with FlopCounterMode(display=False) as counter:
        model(*IMAGES)
    assert outline.num_flops == counter.get_total_flops() == sum(each.num_flops for each in outline.stages)
    assert outline.num_parameters == sum(each.num_parameters for each in outline.stages)
    assert outline.num_parameters == sum(each.numel() for each in model.parameters())
    assert outline.num_stages == num_stages


def test_units_are_in_call_order():
    units = pl.split(llama(3), example_kwargs=TOKENS, num_stages=2).units
    layers = [f"model.layers.{i}" for i in range(3)]
    assert [each.name for each in units] == ["model.embed_tokens", *layers, "model.norm", "lm_head"]
    assert {each.kind for each in units[1:4]} == {"LlamaDecoderLayer"}
    assert [each.stage for each in units] == sorted(each.stage for each in units)


def test_tied_parameters_are_named_with_their_stages():
    (shared,) = pl.split(llama(), example_kwargs=TOKENS, num_stages=3).shared
    assert shared == SharedParameter(("model.embed_tokens.weight", "lm_head.weight"), (0, 2), 800, 3200)


def test_a_parameter_in_several_stages_is_counted_once_in_the_model():
    outline = pl.split(llama(), example_kwargs=TOKENS, num_stages=3)
    assert sum(each.num_parameters for each in outline.stages) == outline.num_parameters + 800


def test_encoder_memory_and_paths_are_named():
    inputs = {**TOKENS, "decoder_input_ids": torch.zeros(2, 4, dtype=torch.long)}
    values = pl.split(t5(), example_kwargs=inputs, cuts=["decoder.block.0", "decoder.block.1"]).values
    assert [(each.made_by, each.to_stages) for each in values][:2] == [
        ("encoder.dropout (call 2)", (1, 2)),
        ("decoder.dropout (call 1)", (1,)),
    ]
    assert "decoder.block.0[0]" in [each.made_by for each in values]


def test_integer_values_need_no_gradient():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Embedding(4, 4)

        def forward(self, x):
            return self.second(self.first(x).argmax(1))

    (value,) = pl.split(Picks(), (torch.zeros(3, 4),), cuts=["second"]).values
    assert (value.made_by, value.dtype, value.num_bytes, value.needs_grad) == ("argmax in Picks", "int64", 24, False)


def test_what_is_written_in_place_has_a_form():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            a = self.first(x)
            a += 1
            return self.second(a)

    (value,) = pl.split(Adds(), (torch.zeros(3, 4),), cuts=["second"]).values
    assert (value.made_by, value.shape) == ("add_ in Adds", (3, 4))


# The model stays as it is, and nobody keeps it.


@pytest.mark.parametrize(("make", "inputs"), [(Skips, (torch.zeros(2, 4),)), (chain, (torch.zeros(2, 4),))])
def test_the_model_stays_as_it_is(make, inputs):
    model = make()
    before = {name: (id(each), each.clone()) for name, each in model.state_dict(keep_vars=True).items()}
    pl.split(model, inputs, num_stages=2)
    after = model.state_dict(keep_vars=True)
    assert {name: id(each) for name, each in after.items()} == {name: each for name, (each, _) in before.items()}
    assert all(torch.equal(after[name], each) for name, (_, each) in before.items())


def test_random_state_stays_as_it_is():
    before = torch.get_rng_state()
    pl.split(llama, example_kwargs=TOKENS, num_stages=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_factory_and_its_model_give_the_same():
    made = pl.split(llama(), example_kwargs=TOKENS, num_stages=3)
    assert pl.split(llama, example_kwargs=TOKENS, num_stages=3) == made
    assert hash(pl.split(llama, example_kwargs=TOKENS, num_stages=3)) == hash(made)


@pytest.mark.parametrize("options", [{"num_stages": 3}, {"cuts": ["stages.1", "head"]}])
def test_stages_are_those_that_a_pipeline_runs(options):
    outline = pl.split(ConvNet(), IMAGES, **options)
    made = split_model(ConvNet(), inputs=(IMAGES, {}), **options)
    assert [each.units for each in outline.stages] == [tuple(u.name for u in units) for units in made.stages]


# Chains.


def test_a_chain_without_inputs_has_no_values():
    outline = pl.split(chain(), num_stages=2)
    assert (outline.values, outline.num_flops, outline.stages[0].receives) == (None, None, None)
    assert [each.num_parameters for each in outline.units] == [40, 0, 18]
    assert "What crosses the cuts is not known without example inputs." in str(outline)


def test_a_chain_with_inputs_has_values_and_flops():
    outline = pl.split(chain(), (torch.zeros(3, 4),), cuts=[1])
    assert outline.values == (CrossingValue("0", 0, (1,), (3, 8), "float32", 96, needs_grad=True),)
    assert [each.num_flops for each in outline.stages] == [2 * 3 * 4 * 8, 2 * 3 * 8 * 2]


def test_a_list_is_its_stages():
    class Two(nn.Module):
        def forward(self, a, b):
            return a + b

    class Both(nn.Module):
        def forward(self, x):
            return {"a": x, "b": (x > 0).float()}

    outline = pl.split([nn.Linear(4, 4), Both(), Two()], (torch.zeros(2, 4),))
    assert [each.made_by for each in outline.values] == ["0", "1['a']", "1['b']"]
    assert [each.needs_grad for each in outline.values] == [True, True, False]
    assert outline.model == "list"


@pytest.mark.parametrize(
    ("options", "sizes"), [({"cuts": ["1", "2"]}, [1, 1, 1]), ({"cuts": [2, 1], "num_stages": 2}, [2, 1])]
)
def test_a_chain_is_cut_at_names_and_by_sizes(options, sizes):
    assert [len(each.units) for each in pl.split(chain(), **options).stages] == sizes


def test_a_cut_inside_of_a_child_of_a_chain():
    outline = pl.split(nn.Sequential(Block(3), Block(3)), IMAGES, cuts=["1.norm1"])
    assert outline.stages[1].units[0] == "1.norm1"
    assert [each.made_by for each in outline.values] == ["0", "1.conv1"]


def test_a_name_that_a_chain_lacks_is_refused():
    with pytest.raises(SplitError, match=r"cuts=\[…, '7', …\] was given, but no module of that name was called"):
        pl.split(chain(), cuts=["7"])


def test_a_layer_of_a_chain_may_look_at_numbers():
    class Looks(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    layers = [nn.Linear(4, 4), Looks(), nn.Linear(4, 4)]
    outline = pl.split(nn.Sequential(*layers), (torch.zeros(2, 4),), cuts=[1, 2])
    assert [each.made_by for each in outline.values] == ["0", "1"]


def test_one_stage_of_a_module_has_its_figures():
    outline = skips(num_stages=1)
    assert (outline.num_stages, outline.values, outline.stages[0].units) == (1, (), ("first", "second", "third"))
    assert outline.num_flops == 2 * 2 * 4 * 4 * 2


# Cuts inside of blocks.


@pytest.mark.parametrize(
    ("cuts", "starts"),
    [
        (["model.layers.3.mlp"], ["model.layers.3.mlp"]),
        (["model.layers.1.self_attn", "model.layers.4"], ["model.layers.1.self_attn", "model.layers.4"]),
        (["model.layers.2.mlp.down_proj"], ["model.layers.2.mlp.down_proj"]),
        (["model.layers.2", "lm_head"], ["model.layers.2", "lm_head"]),
    ],
)
def test_a_cut_inside_a_block_of_a_llama(cuts, starts):
    outline = pl.split(llama(), example_kwargs=TOKENS, cuts=cuts)
    firsts = [each.units[0] for each in outline.stages[1:]]
    assert [name for name, start in zip(firsts, starts, strict=True) if name == start or name.startswith(f"{start}.")]
    assert len(firsts) == len(starts)
    assert sum(each.num_parameters for each in outline.stages) >= outline.num_parameters


def test_a_cut_at_the_mlp_sends_the_residual_too():
    outline = pl.split(llama(), example_kwargs=TOKENS, cuts=["model.layers.3.mlp"])
    assert [each.made_by for each in outline.values] == [
        "add in model.layers.3",
        "model.layers.3.post_attention_layernorm",
    ]


@pytest.mark.parametrize("cut", ["stages.1", "stages.1.1", "stages.1.1.norm1", "stages.2.0.conv2", "head", "stem.1"])
def test_a_cut_inside_a_block_of_a_conv_net(cut):
    outline = pl.split(ConvNet(), IMAGES, cuts=[cut])
    first = outline.stages[1].units[0]
    assert first == cut or first.startswith(f"{cut}.")
    assert all(not each.startswith(cut) for each in outline.stages[0].units)


def test_sizes_are_as_many_as_stages():
    outline = pl.split(llama(4), example_kwargs=TOKENS, num_stages=3, cuts=[2, 3, 2])
    assert [len(each.units) for each in outline.stages] == [2, 3, 2]


# Text and JSON.


def test_text_is_aligned_and_fits():
    lines = str(pl.split(llama(12), example_kwargs=TOKENS, num_stages=4)).splitlines()
    assert max(map(len, lines)) <= 120
    assert "    1  model.layers.3 … model.layers.5 (3)" in "\n".join(lines)
    assert lines[0] == "LlamaForCausalLM: 15 calls of 15 units, 4 stages"


def test_text_of_skips_is_whole():
    assert str(skips(cuts=["second", "third"])) == "\n".join(
        [
            "Skips: 3 calls of 3 units, 3 stages",
            "48 parameters (192 B), 72 B of buffers, 32 B of them in every stage, 128 FLOPs in a forward",
            "3 pieces of glue: 2 on stage 1, 1 on stage 2",
            "",
            "stage  units                parameters  bytes  FLOPs  receives        sends",
            "    0  first                        20   80 B    64   -               64 B to 1, 2",
            "    1  second + 1 for glue          12   88 B     0   32 B from 0     32 B to 2",
            "    2  third                        16   64 B    64   64 B from 0, 1  -",
            "",
            "value         from  to    shape   dtype    bytes  gradient",
            "first            0  1, 2  (2, 4)  float32   32 B  yes",
            "mul in Skips     1  2     (2, 4)  float32   32 B  yes",
        ]
    )


def test_long_names_are_shortened_in_the_middle():
    inner = nn.Linear(4, 4)
    for _ in range(12):
        inner = nn.ModuleDict({"a_rather_long_name": inner})

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = inner, nn.Linear(4, 4)

        def forward(self, x):
            module = self.inner
            while isinstance(module, nn.ModuleDict):
                module = module["a_rather_long_name"]
            return self.last(module(x))

    text = str(pl.split(Deep(), (torch.zeros(2, 4),), num_stages=2))
    assert max(map(len, text.splitlines())) <= 120
    assert "inner.a_rather" in text


def test_many_values_are_not_all_printed():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 50), nn.Linear(50, 4)

        def forward(self, x):
            parts = [each * 2 for each in self.first(x).split(1, 1)]
            return self.second(torch.cat(parts, 1)) + sum(each.sum() for each in parts)

    outline = pl.split(Many(), (torch.zeros(2, 4),), cuts=["second"])
    assert len(outline.values) > 50
    assert str(outline).endswith(f"… and {len(outline.values) - 40} more values")


def test_json_has_everything():
    outline = skips(cuts=["second", "third"])
    read = json.loads(outline.to_json())
    assert read == outline.as_dict()
    assert read["stages"][0]["sends"] == {"1": 32, "2": 32}
    assert read["stages"][0]["receives"] == {}
    assert read["values"][0] == {
        "made_by": "first", "from_stage": 0, "to_stages": [1, 2], "shape": [2, 4], "dtype": "float32",
        "num_bytes": 32, "needs_grad": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 30, "3.0 GiB"), (1 << 60, "1048576.0 TiB")],
)
def test_bytes_read_well(number, text):
    assert in_bytes(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 FLOPs"), (999, "999 FLOPs"), (1500, "1.5 kFLOPs"), (2 * 10**15, "2.0 PFLOPs")]
)
def test_flops_read_well(number, text):
    assert in_flops(number) == text


# What is wrong.


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (Skips, {"num_stages": 2}, "a Skips is cut by running it, and no inputs were given\nhint: pass example_args="),
        ("model", {}, "str 'model' was given; a module, a list with one module per stage, or a callable"),
        (lambda: 3, {}, "the factory returned a int; an nn.Module is needed"),
        (chain, {"num_stages": 0}, "num_stages=0 was given; a whole number of at least 1 is needed"),
        (chain, {"num_stages": 4}, "4 stages were asked for, but the model has 3 layers"),
    ],
)
def test_what_cannot_be_split_is_refused(given, options, message):
    with pytest.raises(SplitError, match="^" + message.replace("(", r"\(")):
        pl.split(given, **options)


# A model that no memory holds.

_SEVENTY = """
import resource, torch
from transformers import LlamaConfig, LlamaForCausalLM
import pipeloom as pl

config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                     num_key_value_heads=8, vocab_size=128256)
tokens = torch.zeros(1, 512, dtype=torch.long)
outline = pl.split(lambda: LlamaForCausalLM(config), example_kwargs={"input_ids": tokens}, num_stages=8)
print(outline.num_parameters, len(outline.units), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_seventy_billion_parameters_fit_in_two_gibibytes():
    out = subprocess.run([sys.executable, "-c", _SEVENTY], capture_output=True, text=True, check=True, timeout=300)
    num_parameters, num_units, peak_mib = map(int, out.stdout.split())
    assert (num_parameters, num_units) == (70_553_706_496, 83)
    assert peak_mib < 2048
