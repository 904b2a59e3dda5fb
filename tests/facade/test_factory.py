"""A model from a factory, with its weights read from files."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pipeloom as pl
from pipeloom.errors import CheckpointError, SplitError
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients


class Chain(nn.Module):
    """Residual layers with a head that shares the first one's weight, a buffer that is stored and one that is not."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.zeros(8))
        self.register_buffer("steps", torch.arange(8.0), persistent=False)

    def forward(self, x):
        x = x * self.scale + self.shift
        for layer in self.layers:
            x = x + layer(x).tanh() * self.steps
        return self.head(x)


def stored(folder: Path) -> tuple[Chain, Path]:
    torch.manual_seed(3)
    model = Chain()
    model.shift.fill_(0.5)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(state, folder / "model.safetensors")
    return model, folder / "model.safetensors"


OPTIONS = {"num_stages": 3, "num_microbatches": 2, "loss_fn": lambda output: output.square().mean()}


@pytest.mark.parametrize("example", [(), (torch.zeros(2, 8),)], ids=["cut at the first step", "cut by an example"])
def test_trains_as_the_model_that_was_stored(example, tmp_path):
    reference, path = stored(tmp_path)
    torch.manual_seed(4)
    with pl.Pipeline(factory=Chain, weights=path, example_args=example, **OPTIONS) as pipe:
        inputs = torch.randn(6, 8)
        loss = pipe.step(inputs)
        assert_bit_equal(loss, expected_step(reference, inputs), "loss")
        assert_same_gradients(pipe, reference)
        model = pipe.unwrap()
    assert model.head.weight is model.layers[0].weight
    assert model.shift.tolist() == [0.5] * 8


def expected_step(reference, inputs):
    from pipeloom.testing import sequential_step

    return sequential_step(reference, inputs, **OPTIONS)


def test_a_sequential_is_read_too(tmp_path):
    def factory():
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    reference = factory()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    with pl.Pipeline(factory=factory, weights=tmp_path, **OPTIONS) as pipe:
        for name, tensor in pipe.state_dict().items():
            assert_bit_equal(tensor, reference.state_dict()[name], name)


def test_a_factory_alone_makes_the_model():
    made = Chain()
    reference = copy.deepcopy(made)
    with pl.Pipeline(factory=lambda: made, **OPTIONS) as pipe:
        pipe.step(torch.ones(4, 8))
        assert pipe.unwrap() is made
    assert not torch.equal(made.layers[1].weight.grad, torch.zeros(8, 8))
    assert torch.equal(made.layers[1].weight, reference.layers[1].weight)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no model and no factory were given; one of them is needed"),
        ({"model": Chain(), "factory": Chain}, "a model and a factory were given; one of them is needed"),
        ({"factory": 3}, "factory=3 was given; a function without arguments that makes the model is needed"),
        ({"factory": lambda: 3}, r"made 3; an nn.Module is needed"),
    ],
)
def test_what_makes_no_model(given, message):
    with pytest.raises(SplitError, match=message):
        pl.Pipeline(**given, **OPTIONS)


def test_weights_that_lack_a_parameter(tmp_path):
    _, path = stored(tmp_path)

    def larger():
        model = Chain()
        model.layers.append(nn.Linear(8, 8))
        return model

    with pytest.raises(CheckpointError, match=r"layers\.4"):
        pl.Pipeline(factory=larger, weights=path, example_args=(torch.zeros(2, 8),), **OPTIONS)
