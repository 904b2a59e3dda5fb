"""What parents and layers do to each other's attributes: carried over, or refused by name; never another result."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import UncuttableCode
from tests.numerics.asserts import assert_bit_equal

NUM_MICROBATCHES = 4


def loss_fn(output):
    return output.square().mean()


def assert_like_a_plain_loop(model, num_steps=3, num_stages=2, **options):
    reference, x = copy.deepcopy(model), torch.randn(8, 8)
    with pl.Pipeline(
        model, num_stages=num_stages, num_microbatches=NUM_MICROBATCHES, loss_fn=loss_fn, **options
    ) as pipe:
        for _ in range(num_steps):
            loss = pipe.step(x)
            expected = 0
            for part in x.chunk(NUM_MICROBATCHES):
                each = loss_fn(reference(part))
                (each / NUM_MICROBATCHES).backward()
                expected += each.detach() / NUM_MICROBATCHES
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            own = dict(pipe.named_parameters())
            for name, parameter in reference.named_parameters():
                if parameter.grad is None:
                    assert own[name].grad is None, name
                else:
                    assert_bit_equal(own[name].grad, parameter.grad, name)
    return model, reference


class Layers(nn.Module):
    def __init__(self, make=lambda: nn.Linear(8, 8), **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for _ in range(4))
        vars(self).update(attributes)


class Freezes(Layers):
    """Its BatchNorms don't move, whatever the model's mode, as detectors have it."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(4))

    def forward(self, x):
        self.norms.eval()
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        return x


class SwitchesDropoutOff(Layers):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.9)

    def forward(self, x):
        self.dropout.p = 0.0
        for layer in self.layers:
            x = self.dropout(layer(x))
        return x


class Scaled(nn.Module):
    """Scales by what its parent has set on it."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x):
        return self.linear(x) * self.scale


class SetsScales(Layers):
    def __init__(self):
        super().__init__(Scaled)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            layer.scale = 1.0 + i
            x = layer(x)
        return x


class SetsTensors(Layers):
    """Sets on each layer what the first one made."""

    def __init__(self):
        super().__init__(Scaled)

    def forward(self, x):
        gate = self.layers[0](x).sigmoid()
        for layer in self.layers[1:]:
            layer.scale = gate
            x = layer(x)
        return x


class Counts(nn.Module):
    """Leaves on itself how often it ran, and on what."""

    def __init__(self):
        super().__init__()
        self.linear, self.num_calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.num_calls += 1
        self.shape = tuple(x.shape)
        return self.linear(x)


class ReadsCounts(Layers):
    def __init__(self):
        super().__init__(Counts)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * layer.shape[1]
        return x


class Collects(Layers):
    """Collects what its layers return by hooks that it puts on them each time."""

    def forward(self, x):
        features = []
        handles = [
            layer.register_forward_hook(lambda *given: features.append(given[-1]), with_kwargs=i % 2 == 1)
            for i, layer in enumerate(self.layers)
        ]
        for layer in self.layers:
            x = layer(x).tanh()
        for handle in handles:
            handle.remove()
        return x + sum(features)


class ReplacesForward(Layers):
    """Puts another forward on a layer each time it is called itself."""

    def forward(self, x):
        linear = self.layers[2]
        linear.forward = lambda value: nn.functional.linear(value, linear.weight, linear.bias) * 2
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(
    "kind", [ReplacesForward, Freezes, SwitchesDropoutOff, SetsScales, SetsTensors, ReadsCounts, Collects]
)
def test_what_parents_and_layers_do_to_each_other_is_done(kind, num_stages):
    """All of it was dropped in silence: parents see stand-ins of layers. Frozen BatchNorms moved, dropout dropped."""
    assert_like_a_plain_loop(kind(), num_stages=num_stages)


class Peak(nn.Module):
    """Leaves a number on itself that depends on numbers."""

    def __init__(self):
        super().__init__()
        self.linear, self.peak = nn.Linear(8, 8), 0.0

    def forward(self, x):
        y = self.linear(x)
        self.peak = y.abs().max().item()
        return y


def test_a_number_made_of_numbers_is_no_other_stages():
    """The number of the stage's own clone was used, which is that of before the first call: a loss of 0."""

    class ReadsPeaks(Layers):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh() * layer.peak
            return x

    class DoesNot(Layers):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    pipe = pl.Pipeline(ReadsPeaks(Peak), num_stages=2, num_microbatches=4, loss_fn=loss_fn)
    with pytest.raises(
        UncuttableCode, match=r"layer\(x\).tanh\(\) \* layer.peak.*a number that a unit makes of numbers"
    ):
        pipe.step(torch.randn(8, 8))
    assert_like_a_plain_loop(DoesNot(Peak))


class Assigns(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        for layer in self.layers:
            x = layer(x - self.mean)
        return x


class Replaces(Layers):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(8, 8)

    def forward(self, x):
        self.layers[2] = self.spare
        for layer in self.layers:
            x = layer(x)
        return x


class SharesNumbers(Layers):
    """Tells its layers the depth by an object that all of them hold."""

    def __init__(self):
        context = SimpleNamespace(depth=0)

        class Deep(nn.Linear):
            def forward(self, x):
                return super().forward(x) * self.context.depth

        super().__init__(lambda: Deep(8, 8), context=context)
        for layer in self.layers:
            layer.context = context

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            self.context.depth = 1 + i
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Assigns, "assigns the buffer 'mean' anew; .*hint: write into it, self.mean.copy_"),
        (Replaces, "puts another module in the place of 'layers.2', around the units; .*hint: have both modules"),
        (SharesNumbers, "the model and module 'layers.0' share an object, 'context', .*hint: return them, pass them"),
    ],
)
def test_what_stages_cannot_have_in_common_is_refused(kind, message):
    """Each stage went on with an old value, or with that of whichever thread was last."""
    pipe = pl.Pipeline(kind(), num_stages=2, num_microbatches=4, loss_fn=loss_fn)
    with pytest.raises(UncuttableCode, match=f"(?s){message}"):
        pipe.step(torch.randn(8, 8))


def test_what_a_parent_counts_goes_on_in_evaluation_and_comes_home():
    """Evaluation began to count at 0 again, and so did the model that `unwrap` gave back."""

    class Steps(Layers):
        def forward(self, x):
            self.num_calls += 1
            for layer in self.layers:
                x = layer(x).tanh() * self.num_calls
            return x

    model = Steps(num_calls=0)
    reference, x = copy.deepcopy(model), torch.randn(8, 8)
    pipe = pl.Pipeline(model, num_stages=2, num_microbatches=4, loss_fn=loss_fn)
    pipe.step(x)
    for part in x.chunk(4):
        reference(part)
    with torch.no_grad():
        expected = torch.cat([reference(part) for part in x.chunk(4)])
    assert_bit_equal(pipe.eval()(x), expected, "output")
    assert pipe.unwrap().num_calls == reference.num_calls == 8
