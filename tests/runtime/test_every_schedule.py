"""Every schedule runs, on models cut both ways, with the oracle's bits (contract 1)."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import pipeloom as pl
from pipeloom.errors import UnsupportedShape
from pipeloom.ir import Kind
from pipeloom.schedules.registry import ENTRIES
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients

NUM_MICROBATCHES = 8
VOCABULARY, WIDTH = 16, 32  # narrower products are not worth a W
OPPOSED = ("chimera", "dualpipe")
NAMES = [name for name, entry in ENTRIES.items() if not entry.is_asynchronous]


class Block(nn.Module):
    """Attention and MLP with dropout."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        query, key, value = self.query_key_value(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.drop(self.down(gelu(self.up(self.norms[1](x)))))


class Gpt(nn.Module):
    """Tied ends, and a value that skips all stages."""

    def __init__(self, num_layers=8):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        first = x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


def chain(norm=nn.BatchNorm1d):
    """Layers with buffers, and one that works in place."""
    layers = [nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*[copy.deepcopy(layer) for _ in range(4) for layer in layers])


def token_loss(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten())


def square(output, target):
    return (output - target).square().mean()


def tokens():
    return torch.randint(VOCABULARY, (2, 11, 4)).unbind()  # 11 rows: micro-batches of two sizes


MODELS = {"gpt": (Gpt, tokens, token_loss), "chain": (chain, lambda: torch.randn(2, 19, WIDTH).unbind(), square)}


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_have_the_oracles_bits(name, kind, recompute):
    torch.manual_seed(0)
    make, batch, loss_fn = MODELS[kind]
    if kind == "chain" and name in OPPOSED:  # whose buffers both replicas would write
        make = partial(chain, nn.LayerNorm)
    model, num_stages = make(), 2 * ENTRIES[name].stages_per_rank
    reference = copy.deepcopy(model)
    options = {"num_stages": num_stages, "num_microbatches": NUM_MICROBATCHES, "loss_fn": loss_fn}
    with pl.Pipeline(model, schedule=name, recompute=recompute, **options) as pipe:
        assert pipe.num_ranks == 2
        for step_index in range(1 if recompute else 2):
            x, target = batch()
            loss = pipe.step(x, target=target)
            step = {"target": target, "schedule": pipe.schedule, "step_index": step_index}
            expected = sequential_step(reference, x, **step, **options)
            assert_bit_equal(loss, expected, "loss")
            assert_same_gradients(pipe, reference)


@pytest.mark.parametrize("name", NAMES)
def test_eight_ranks(name):
    torch.manual_seed(0)
    num_stages = 8 * ENTRIES[name].stages_per_rank
    model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(num_stages)])
    reference, (x, target) = copy.deepcopy(model), torch.randn(2, 2 * NUM_MICROBATCHES, WIDTH).unbind()
    options = {"num_stages": num_stages, "num_microbatches": NUM_MICROBATCHES, "loss_fn": square}
    with pl.Pipeline(model, schedule=name, **options) as pipe:
        assert pipe.num_ranks == 8
        loss = pipe.step(x, target=target)
        expected = sequential_step(reference, x, target=target, schedule=pipe.schedule, **options)
        assert_bit_equal(loss, expected, "loss")
        assert_same_gradients(pipe, reference)


def test_halves_are_actions_of_their_own():
    torch.manual_seed(0)
    with pl.Pipeline(Gpt(), schedule="zb-h1", num_stages=2, num_microbatches=4, loss_fn=token_loss) as pipe:
        x, target = tokens()
        pipe.step(x, target=target)
        spans = {kind: [s for s in pipe.timeline if s.action.kind is kind] for kind in Kind}
    assert {kind: len(found) for kind, found in spans.items() if found and kind.is_compute} == {
        Kind.FORWARD: 8,
        Kind.INPUT_GRAD: 8,
        Kind.WEIGHT_GRAD: 8,
    }
    assert all(span.duration_s > 0 for span in spans[Kind.WEIGHT_GRAD])


def test_ranks_say_how_many_stages_each_holds():
    options = {"num_stages": 8, "num_microbatches": 8, "loss_fn": token_loss, "schedule": "interleaved"}
    assert pl.Pipeline(Gpt(), **options).num_ranks == 4
    assert pl.Pipeline(Gpt(), num_ranks=2, **options).num_ranks == 2
    with pytest.raises(UnsupportedShape, match=r"'zb-v' holds 2 stages on each rank; the model is cut into 3"):
        pl.Pipeline(Gpt(), **options | {"schedule": "zb-v", "num_stages": 3})


def test_a_failure_in_the_second_half_leaves_gradients_as_they_were():
    torch.manual_seed(0)
    model = Gpt()

    def refuse(grad):
        raise ZeroDivisionError("in W")

    handle = model.blocks[1].up.weight.register_hook(refuse)
    with pl.Pipeline(model, schedule="zb-h1", num_stages=2, num_microbatches=4, loss_fn=token_loss) as pipe:
        x, target = tokens()
        with pytest.raises(ZeroDivisionError, match="in W"):
            pipe.step(x, target=target)
        assert all(parameter.grad is None for parameter in pipe.parameters())
        handle.remove()
        assert pipe.step(x, target=target) > 0
