"""Random numbers between units, and code that takes another way because of them."""

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients


class LayerDrop(nn.Module):
    """Skips each layer by chance, as OPT and wav2vec 2.0 do in training."""

    def __init__(self, num_layers=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            if not self.training or torch.rand([]) > 0.5:
                x = x + layer(x).tanh()
        return x * 1.0


class DropsPositions(nn.Module):
    """Drops out a table of positions, which depends on no unit: every stage computes it for itself."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        table = self.drop(torch.linspace(0, 1, 8))
        for layer in self.layers:
            x = x + layer(x + table).tanh() + nn.functional.dropout(table, 0.5, self.training)
        return x


class Transcribes(nn.Module):
    """CTC loss between units and output: torch has no shape function for its kernel."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, labels):
        for layer in self.layers:
            x = x + layer(x).tanh()
        lengths = torch.full((len(x),), x.shape[1]), torch.full((len(x),), labels.shape[1])
        return nn.functional.ctc_loss(x.log_softmax(-1).transpose(0, 1), labels, *lengths)


def assert_like_the_oracle(model, num_stages, *inputs, num_steps=1, **options):
    reference, options = copy.deepcopy(model), {"num_stages": num_stages, "num_microbatches": 4, **options}
    with pl.Pipeline(model, **options) as pipe:
        for step_index in range(num_steps):
            found = pipe.step(*inputs)
            assert_bit_equal(found, sequential_step(reference, *inputs, step_index=step_index, **options), "loss")
        assert_same_gradients(pipe, reference)


def square(output):
    return output.square().mean()


@pytest.mark.parametrize("num_stages", [2, 3])
def test_layer_drop(num_stages):
    """Each micro-batch takes its own way, and the first step's dry run skipped a layer that a later one calls.

    That layer belonged to no stage, so in processes its weights were on no rank that called it.
    """
    torch.manual_seed(0)
    model = LayerDrop()
    assert_like_the_oracle(model, num_stages, torch.randn(8, 8), num_steps=4, loss_fn=square)
    assert all(layer.weight.grad is not None for layer in model.layers)


class CountsItsLayers(nn.Module):
    """Adds up what its layers said, and fails where chance left none: NLLB's experts do with few layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.odds = 0.5

    def forward(self, x):
        said = []
        for layer in self.layers:
            if torch.rand([]) < self.odds:
                x = layer(x).tanh()
                said.append(x.mean())
        return x + torch.stack(said).sum()


def test_a_draw_that_the_model_fails_for():
    """A model that skips layers is surveyed with several draws; one for which its own code fails says nothing."""
    torch.manual_seed(0)
    model, x = CountsItsLayers(), torch.randn(8, 8)
    assert pl.split(model, (x,), num_stages=2).num_stages == 2
    model.odds = 0.0
    with pytest.raises(RuntimeError, match="stack expects a non-empty TensorList"):
        pl.split(model, (x,), num_stages=2)


def test_a_dropped_out_table_is_the_same_on_every_stage():
    """XLNet drops out its positions; each stage drew another mask from the process's generator, and bits differed."""
    torch.manual_seed(0)
    assert_like_the_oracle(DropsPositions(), 3, torch.randn(8, 8), num_steps=2, loss_fn=square)


def test_a_kernel_without_a_shape_function():
    torch.manual_seed(0)
    assert_like_the_oracle(Transcribes(), 3, torch.randn(8, 12, 8), torch.randint(1, 8, (8, 3)))


def test_a_dry_run_leaves_the_users_random_numbers_alone():
    model, inputs = LayerDrop(), torch.zeros(2, 8)
    state = torch.get_rng_state()
    pl.split(model, (inputs,), num_stages=2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_evaluation_drops_nothing(num_stages):
    model, inputs = LayerDrop(), torch.randn(8, 8)
    with pl.Pipeline(model, num_stages=num_stages, num_microbatches=4, loss_fn=square) as pipe:
        pipe.step(inputs)
        found = pipe.eval()(inputs)
    with torch.no_grad():
        assert_bit_equal(found, torch.cat([model(part) for part in inputs.chunk(4)]), "output")


def test_units_that_draw_move_the_draws_that_the_model_fails_for():
    """The survey looks into layers, the recording doesn't: with the same seed the code between them drew others."""

    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x) if float(x.sum()) > 1e9 else self.linear(x + torch.rand([]))

    for seed in range(8):
        torch.manual_seed(seed)
        model = CountsItsLayers()
        model.layers, model.odds = nn.ModuleList(Draws() for _ in range(3)), 0.3
        assert pl.split(model, (torch.randn(8, 8),), num_stages=2).num_stages == 2
