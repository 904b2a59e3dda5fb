"""Kinds of models that real architectures showed: each a small model of ours that does the same."""

import copy
import functools
import random
import re
from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from pipeloom.errors import DrawError, SplitError
from pipeloom.recording.made_up import run_for_real
from pipeloom.standins.placeholder import Placeholder
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients


def square(output):
    return output.square().mean()


def assert_like_the_oracle(model, inputs, **options):
    """One step in three stages, and one of the whole model."""
    options = {"num_stages": 3, "num_microbatches": 2, "loss_fn": square, **options}
    reference = copy.deepcopy(model)
    with pl.Pipeline(model, **options) as pipe:
        found = pipe.step(**inputs)
        assert_bit_equal(found, sequential_step(reference, **options, **inputs), "loss")
        assert_same_gradients(pipe, reference)


class WritesInCheckpoints(nn.Module):
    """A checkpoint around units one of which writes into what it is given, as in DenseNet."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(lambda x, layer=layer: layer(self.relu(layer(x))), x, use_reentrant=False)
        return x


def test_a_unit_that_writes_into_its_input_has_no_checkpoint_of_its_own():
    assert_like_the_oracle(WritesInCheckpoints(), {"x": torch.randn(4, 8)})


class MasksByChance(nn.Module):
    """Masks what goes from layer to layer by other draws than torch's, as wav2vec 2.0 does in training."""

    def __init__(self, draw):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.draw = draw

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if self.training:
                x = x * (self.draw() < 0.5)
        return x


@pytest.mark.parametrize("draw", [random.random, lambda: random.uniform(0, 1), lambda: np.random.rand(1).item()])
def test_code_between_units_that_draws_from_a_generator_of_the_process_is_refused(draw):
    model, x = MasksByChance(draw), torch.randn(4, 8)
    with pl.Pipeline(model, num_stages=2, num_microbatches=2, loss_fn=square) as pipe:
        with pytest.raises(DrawError, match=r"numpy's global generator: test_kinds.py:\d+: .*\(.*every stage runs"):
            pipe.step(x)
        pipe.eval()
        assert pipe.step(x) > 0


@dataclass
class Pair:
    left: float
    right: float


def draws_twice():
    return Pair(np.random.rand(), np.random.rand()).left


def test_the_line_that_drew_is_named():
    """numpy's functions are no events for a profiler; the code of a dataclass, ``<string>:2``, was named instead."""
    pipe = pl.Pipeline(MasksByChance(draws_twice), num_stages=2, num_microbatches=2, loss_fn=square)
    with pytest.raises(DrawError, match=r"test_kinds.py:\d+: return Pair\(np.random"):
        pipe.step(torch.randn(4, 8))


class DropsLayers(nn.Module):
    """LayerDrop as wav2vec 2.0 has it: the number is drawn even where the rate is 0."""

    def __init__(self, rate, draw):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.rate, self.draw = rate, draw

    def forward(self, x):
        for layer in self.layers:
            drawn = self.draw()
            if not (self.training and drawn < self.rate):
                x = layer(x)
        return x


PYTHONS_DRAWS = [random.random, lambda: random.uniform(0, 1), lambda: random.randrange(10) / 10]


@pytest.mark.parametrize("draw", PYTHONS_DRAWS[1:])
def test_draws_of_a_process_that_change_nothing_are_let_be(draw):
    """Musicgen's decoder was refused for a number that it compares with 0; so was every wav2vec 2.0, even in eval()."""
    state = random.getstate()
    assert_like_the_oracle(DropsLayers(0.0, draw), {"x": torch.randn(4, 8)})
    assert "random" not in vars(random._inst)  # as it was
    random.setstate(state)


class CountsFrames(DropsLayers):
    """Reads lengths off a mask, as wav2vec 2.0 does for its adapter."""

    def forward(self, x):
        lengths = torch.ones(x.shape, dtype=torch.long).cumsum(-1)[:, -1]
        return super().forward(x) * (lengths + 1)[:, None]


def test_a_column_of_a_table_beside_draws_that_change_nothing():
    """Comparing what functions are called with failed: torch won't view the bytes of what lies apart in memory."""
    assert_like_the_oracle(CountsFrames(0.0, lambda: random.random()), {"x": torch.randn(4, 8)})


@pytest.mark.parametrize("draw", PYTHONS_DRAWS)
@pytest.mark.parametrize("rate", [0.05, 0.45])
def test_draws_of_a_process_that_change_something_at_a_small_rate_too_are_refused(draw, rate):
    model, x = DropsLayers(rate, draw), torch.randn(4, 8)
    with pl.Pipeline(model, num_stages=2, num_microbatches=2, loss_fn=square) as pipe, pytest.raises(DrawError):
        pipe.step(x)


class KeepsATable(nn.Module):
    """Keeps a table for the shape it saw last, as YOLO's head does with its anchors; and counts its calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.shape, self.tables, self.num_calls = None, {}, 0

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        if self.shape != x.shape:
            self.shape, self.tables["last"] = x.shape, torch.linspace(0, 1, x.shape[-1])
        return x + self.tables["last"]


def test_what_code_keeps_for_its_next_call_is_made_anew():
    assert_like_the_oracle(KeepsATable(), {"x": torch.randn(4, 8)})


def test_numbers_that_code_counts_go_on():
    class Counts(KeepsATable):
        def forward(self, x):
            x = self.layers[1](self.layers[0](x))
            self.num_calls += 1
            return self.layers[2](x) * self.num_calls

    assert_like_the_oracle(Counts(), {"x": torch.randn(4, 8)})


class Distributed(nn.Module):
    """Ends with a distribution, which looks at its numbers, and with a head that is called after that."""

    def __init__(self, has_late_head):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.late = nn.Linear(1, 1) if has_late_head else None
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, goal):
        first = self.layers[0](x)
        x = first.tanh()
        for layer in self.layers[1:]:
            x = x + layer(x).tanh()
        aside = {"lists": [first.mean()], "nothing": None}
        # torch.compile, anywhere in the process, switches validation off where it is not asked for.
        loss = -torch.distributions.Normal(x, x.exp(), True).log_prob(goal).mean() + aside["lists"][0]
        if loss.item() > 1e9:
            return loss
        loss = loss * self.scale + nn.functional.dropout(goal, 0.5, self.training).mean()
        return loss if self.late is None else self.late(loss.view(1, 1)).sum()


@pytest.mark.parametrize("has_late_head", [False, True])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_last_stage_looks_at_numbers_as_it_likes(has_late_head, num_stages):
    inputs = {"x": torch.randn(4, 8), "goal": torch.randn(4, 8)}
    model = Distributed(has_late_head)
    assert_like_the_oracle(model, inputs, num_stages=num_stages, loss_fn=None)
    with pytest.raises(SplitError, match=r"the model's own forward looks at numbers .*: test_kinds.py:\d+: loss = "):
        pl.Pipeline(model, num_stages=7, num_microbatches=2, loss_fn=None).step(**inputs)


class StopsEarly(nn.Module):
    """Looks at numbers in the middle, or comes back to its first layer after it looked."""

    def __init__(self, comes_back):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.comes_back = comes_back

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
            if not self.comes_back and x.sum() > 1e9:
                return x
        return self.layers[0](x) if x.sum() < 1e9 else x


@pytest.mark.parametrize(("comes_back", "message"), [(False, "own forward looks at"), (True, "0 of an earlier stage")])
def test_numbers_that_a_later_stage_would_need_are_refused(comes_back, message):
    with pytest.raises(SplitError, match=message + r"[^$]*test_kinds.py:\d+: (if|return)"):
        pl.Pipeline(StopsEarly(comes_back), num_stages=3, num_microbatches=2, loss_fn=square).step(torch.randn(4, 8))


def test_the_refusal_names_the_nearest_cuts_and_they_work():
    model = Distributed(False)
    inputs = {"x": torch.randn(4, 8), "goal": torch.randn(4, 8)}
    with pytest.raises(
        SplitError, match=r"the output of 'layers.4', or what .*\nhint: cuts=\['layers.1', .*4'\] works"
    ) as told:
        pl.Pipeline(model, num_stages=7, num_microbatches=2, loss_fn=None).step(**inputs)
    cuts = re.findall(r"'(layers\.\d)'", told.value.hint)
    assert_like_the_oracle(model, inputs, num_stages=len(cuts) + 1, cuts=cuts, loss_fn=None)


class Decodes(nn.Module):
    """Multiplies with the weights of a module that it is handed, as Perceiver's decoder does."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x, embedding):
        return x @ embedding.weight.t() + self.bias


class HandsOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.decoder = nn.Linear(8, 8), Decodes()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.decoder(x, self.embedding)


def test_a_unit_that_is_handed_a_module_shares_its_weights():
    model = HandsOn()
    assert_like_the_oracle(model, {"x": torch.randn(4, 8)})
    made = pl.split(model, (torch.randn(4, 8),), num_stages=3)
    assert [each.num_parameters for each in made.stages] == [2 * 72, 2 * 72, 72 + 8 + 72]


class Remembers(nn.Module):
    """Answers from memory when it is asked again, as rotary embeddings of diffusers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def table(self, size):
        return torch.linspace(0, 1, size).cos()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + self.table(x.shape[-1])
        return x


def test_what_code_remembers_is_computed_anew():
    assert_like_the_oracle(Remembers(), {"x": torch.randn(4, 8)})


class Routes(nn.Module):
    """Chooses rows by their numbers; transformers listens to routers like its gate by hooks."""

    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x):
        chosen = self.gate(x)[:, 0] > 0
        return x.index_put((chosen,), self.expert(x[chosen]))


def test_hooks_of_libraries_hear_what_is_inside_of_modules_that_route():
    seen, listener = [], nn.Module()
    listener.register_forward_hook(lambda *heard: seen.append(heard))
    out, _ = run_for_real(Routes(), (torch.randn(4, 8),), {}, torch.device("cpu"), {"gate": listener})
    assert [type(heard[2]) for heard in seen] == [Placeholder]
    assert (type(out), out.shape) == (Placeholder, (4, 8))


class Fills(nn.Module):
    """Leaves values in containers that it is given, and looks for those of others there."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, shared, aside=None):
        if "first" in shared:
            x = x + shared["first"][1]
        made = self.linear(x).tanh()
        shared.setdefault("first", (made.mean(), made * 2))
        aside[0] += 1
        aside.append(made)
        return made * aside[0]


class Shares(nn.Module):
    """Hands a dict and a list from layer to layer, as Gemma 3n and causal video decoders do."""

    def __init__(self, kind):
        super().__init__()
        self.layers, self.kind = nn.ModuleList(Fills() for _ in range(5)), kind

    def forward(self, x):
        shared, aside = self.kind(), [0]
        for layer in self.layers:
            x = layer(x, shared, aside=aside)
        return x + shared["first"][0] + aside[1] + aside[-1] * aside[0]


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_units_leave_values_in_containers_that_they_are_given(kind, num_stages):
    model, x = Shares(kind), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    loss = sum(square(plain(part)) for part in x.chunk(2)) / 2
    assert_like_the_oracle(model, {"x": x}, num_stages=num_stages)
    assert torch.equal(sequential_step(plain, x, num_microbatches=2, loss_fn=square), loss.detach())


class KeepsABias(nn.Module):
    """In evaluation it keeps what it made of its weights, until it trains again: LeViT's attention keeps its biases."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.biases = nn.Parameter(torch.randn(2, 8))
        self.kept = {}

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.kept = {}
        return self

    def bias(self):
        if self.training:
            return self.biases.flip([1])[0]
        if "bias" not in self.kept:
            self.kept["bias"] = self.biases.flip([1])[0]
        return self.kept["bias"]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh() + self.bias()
        return x


def test_what_evaluation_keeps_of_weights_is_made_anew():
    """The second micro-batch found it, took another way than the first, and was refused."""
    torch.manual_seed(0)
    model, x = KeepsABias(), torch.randn(8, 8)
    with pl.Pipeline(model, num_stages=3, num_microbatches=4, loss_fn=square) as pipe:
        for _ in range(2):
            pipe.train().step(x)
            found = pipe.eval()(x)
            with torch.no_grad():
                expected = torch.cat([copy.deepcopy(model).eval()(part) for part in x.chunk(4)])
                assert_bit_equal(found, expected, "output")
                model.biases.add_(1.0)
