"""What the code of parents does besides calling units and torch's functions, as real models do it."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import SplitError, UncuttableCode

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")


def square(output):
    return output.square().mean()


class Chain(nn.Module):
    """Layers, and something that is done with the output of each."""

    def __init__(self, between, layers=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)) if layers is None else layers
        self.weight = nn.Parameter(torch.randn(8))
        self.between = between
        self.activation = torch.jit.script(swish) if between is scripted else None

    def forward(self, x):
        inputs = x
        for index, layer in enumerate(self.layers):
            x = self.between(self, layer, x, inputs, index)
        return x


def assert_like_plain(make, num_stages=3):
    """Two steps and an evaluation, and a loop over the micro-batches with another model, which copying doesn't make."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    x = torch.randn(8, 8)
    with pl.Pipeline(models[0], num_stages=num_stages, num_microbatches=4, loss_fn=square) as pipe:
        for _step in range(2):
            found = pipe.step(x)
            losses = [square(models[1](each)) / 4 for each in x.chunk(4)]
            for each in losses:
                each.backward()
            torch.testing.assert_close(found, sum(losses).detach())
        grads = dict(pipe.named_parameters())
        for name, parameter in models[1].named_parameters():
            torch.testing.assert_close(grads[name].grad, parameter.grad)
        whole = models[1].eval()
        torch.testing.assert_close(pipe.eval()(x), torch.cat([whole(each) for each in x.chunk(4)]))


def masked(model, layer, x, inputs, index):
    where = torch.arange(8)
    mask = torch.vmap(lambda i: torch.vmap(lambda j: (inputs[:, i] > 0) | (i >= j))(where))(where)
    scale = mask.float().mean((0, 1, 2))
    return layer(x) * (scale * 2 if scale > 0.6 else scale)


def mapped(model, layer, x, inputs, index):
    first = layer(x)
    return torch.vmap(lambda row: row.tanh() * first.sum() * model.weight)(x + 1) + first


def derived(model, layer, x, inputs, index):
    return torch.func.grad(lambda value: value.sin().sum())(layer(x))


def swish(x):
    return x * torch.sigmoid(x)


def scripted(model, layer, x, inputs, index):
    return model.activation(layer(x)) + model.activation(inputs)


@functools.lru_cache(maxsize=1)
def positions(number):
    return torch.arange(number).float() / 10


def memoised(model, layer, x, inputs, index):
    return layer(x) + positions(8) + positions(1) + positions(8 if index % 3 else 1)


def tries(model, layer, x, inputs, index):
    try:
        return layer(x, x)
    except TypeError:
        return layer(x).tanh()


@pytest.mark.parametrize("between", [masked, mapped, derived, scripted, memoised, tries])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_glue_of_these_kinds(between, num_stages):
    """Gemma 3 makes its masks by `torch.vmap`, others scale a layer's output within it, with values in its closure.

    sine embeddings are memoised by `functools.lru_cache`, whose hits depended on other stages' threads; activations are
    functions of TorchScript; and a call that raised was left in the recording.
    """
    assert_like_plain(lambda: Chain(between), num_stages)


class Memoises(Chain):
    @staticmethod
    @functools.lru_cache(maxsize=1)
    def positions(number):
        return torch.arange(number).float() / 10

    def __init__(self):
        super().__init__(lambda m, layer, x, *_: layer(x) + m.positions(8) + m.scaled(1) + m.positions(1) + m.scaled(8))
        self.scaled = functools.lru_cache(maxsize=1)(self.uncached)

    def uncached(self, number):
        return torch.arange(number) * self.layers[0].in_features


def test_memoised_static_methods_and_attributes():
    assert_like_plain(Memoises)


def test_a_memoised_function_has_its_cache_elsewhere():
    """Only where a stage sees the call is it as if there was none; its name leads to what looks the same."""
    assert_like_plain(lambda: Chain(memoised))
    positions.cache_clear()
    assert positions(3) is positions(3)
    assert positions.cache_info().hits == 1
    assert positions.__wrapped__(3) is not positions(3)


class Book(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("sums", torch.full((8,), 3.0))
        self.kept = None

    def encode(self, x):
        if self.kept is None:
            self.kept = self.sums / self.sums.clamp(min=1)
        return x * self.kept


class Mimi(Chain):
    def __init__(self):
        super().__init__(lambda model, layer, x, *_: model.book.encode(layer(x)))
        self.book = Book()


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_cache_in_a_module_that_is_not_called(is_warm):
    """Mimi's codebooks are used by a method, and keep what they are made of: only modules that ran were looked at."""

    def make():
        model = Mimi()
        model(torch.ones(2, 8)) if is_warm else None
        return model

    assert_like_plain(make)


def test_modules_of_torchscript_stay_whole():
    def layers():
        inner = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()))
        traced = torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8))
        return nn.ModuleList([nn.Linear(8, 8), inner, nn.Linear(8, 8), traced])

    assert_like_plain(lambda: Chain(lambda model, layer, x, *_: layer(x).tanh(), layers()))


class Wrapped(nn.Module):
    def __init__(self, is_keyword):
        super().__init__()
        self.inner = nn.Linear(8, 8)

        def with_keyword(x, *, old=self.forward):
            return old(x) * 2

        self.forward = with_keyword if is_keyword else lambda x, old=self.forward: old(x) * 2

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("is_keyword", [False, True])
def test_a_forward_in_the_defaults_of_another(is_keyword):
    """``a.forward = lambda x, old=a.forward: old(x) * 2`` led past the clones, so the model had 0 parts."""

    def make():
        return Chain(lambda model, layer, x, *_: layer(x).tanh(), nn.ModuleList(Wrapped(is_keyword) for _ in range(4)))

    assert_like_plain(make)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layers):
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            out = x = x.detach().requires_grad_()
            for layer in ctx.layers:
                out = layer(out)
        torch.autograd.backward(out, grad)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        return Through.apply(x * 1, self.layers)


def test_modules_that_a_custom_function_calls_are_kept_in_one():
    """Reformer's encoder calls its layers in the forward of a custom autograd function, where nobody can answer."""
    layers = [nn.Linear(8, 8), Reversible(), nn.Linear(8, 8), Reversible()]
    pipe = pl.Pipeline(nn.Sequential(*layers), num_stages=4, num_microbatches=4, loss_fn=square)
    assert pipe.step(torch.randn(8, 8)).isfinite()


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        one, other = x.chunk(2, dim=-1)
        with torch.no_grad():
            other = other + layer(one)
        ctx.save_for_backward(one.detach(), other.detach())
        ctx.layer = layer
        return torch.cat([one, other], dim=-1)

    @staticmethod
    def backward(ctx, grad):
        (one, _), (grad_one, grad_other) = ctx.saved_tensors, grad.chunk(2, dim=-1)
        with torch.enable_grad():
            one = one.requires_grad_()
            ctx.layer(one).backward(grad_other)
        return torch.cat([grad_one + one.grad, grad_other], dim=-1), None


class Hashes(nn.Module):
    """Reformer's encoder: reversible layers, in a custom autograd function, that look at numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return Halves.apply(x if x.abs().max() > 0 else x + 1, self.layer)


def test_a_custom_function_in_a_module_that_looks_at_numbers():
    """Counting its FLOPs put hooks on what modules are given, and a custom function's code has no graph: it raised."""
    layers = [nn.Sequential(nn.Linear(8, 8), Hashes()) for _ in range(3)]
    assert_like_plain(lambda: Chain(lambda model, layer, x, *_: layer(x), copy.deepcopy(nn.ModuleList(layers))))


def in_a_thread(model, layer, x, inputs, index):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(layer, x).result()


def over_a_unit(model, layer, x, inputs, index):
    return torch.vmap(layer)(x)


def with_other_weights(model, layer, x, inputs, index):
    return torch.func.functional_call(layer, {"weight": layer.weight * 2}, (x,))


def by_a_function(model, layer, x, inputs, index):
    return Through.apply(x * model.weight, [layer])


def writes_weights(model, layer, x, inputs, index):
    with torch.no_grad():
        layer.weight.div_(2)
    return layer(x)


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (in_a_thread, "'layers.0' is called from another thread"),
        (over_a_unit, "a transform .* runs the code"),
        (with_other_weights, "in the place of its parameter 'layers.0.weight'"),
        (by_a_function, "within one call of a custom autograd.Function"),
        (writes_weights, "the parameter 'layers.0.weight' is written into"),
    ],
)
def test_what_stages_cannot_do_for_each_other(between, words):
    """Each is refused before anything ran, with the line; RWKV's rescaling left some of the weights rescaled."""
    model = Chain(between)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UncuttableCode, match=words):
        pl.Pipeline(model, num_stages=2, num_microbatches=2, loss_fn=square).step(torch.randn(4, 8))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_model_that_calls_no_module():
    def weighted(model, layer, x, inputs, index):
        return x @ layer.weight

    with pytest.raises(SplitError, match="seen to call none of its modules"):
        pl.Pipeline(Chain(weighted), num_stages=2, num_microbatches=2, loss_fn=square).step(torch.randn(4, 8))


@pytest.mark.parametrize(
    "is_kept",
    [
        lambda: np.random.random() >= 0,
        lambda: np.random.uniform(0, 1) < 1,
        lambda: np.random.rand(1).item() >= 0,
    ],
)
def test_draws_of_numpy_that_change_nothing(is_kept):
    """Layer drop with a rate of 0, as VITS and wav2vec 2.0 draw for it."""
    assert_like_plain(lambda: Chain(lambda model, layer, x, *_: layer(x) if is_kept() else x))


class Fills(nn.Module):
    """Returns nothing."""

    def __init__(self, fill):
        super().__init__()
        self.linear, self.fill = nn.Linear(8, 8), fill

    def forward(self, given):
        self.fill(given, self.linear)


class Filling(nn.Module):
    def __init__(self, fill, begin, end):
        super().__init__()
        self.layers, self.begin, self.end = nn.ModuleList(Fills(fill) for _ in range(6)), begin, end

    def forward(self, x):
        given = self.begin(x)
        for layer in self.layers:
            layer(given)
        return self.end(given)


def fill_dict(given, linear):
    given["x"] = linear(given["x"]).tanh()
    given["count"] = given.get("count", 0) + 1


def fill_tensor(given, linear):
    given[1].add_(linear(given[0]).tanh())


@pytest.mark.parametrize(
    ("fill", "begin", "end"),
    [
        (fill_dict, lambda x: {"x": x}, lambda given: given["x"] * given["count"]),
        (fill_tensor, lambda x: (x, torch.zeros_like(x)), lambda given: given[1]),
    ],
    ids=["dict", "tensor"],
)
def test_modules_that_return_nothing_and_change_what_they_are_given(fill, begin, end):
    """They were taken for modules that no stage has to have: "the forward was seen to call none of its modules"."""
    assert_like_plain(lambda: Filling(fill, begin, end))
