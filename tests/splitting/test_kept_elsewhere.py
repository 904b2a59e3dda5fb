"""Values that are kept elsewhere than in what a module returns: shared objects, hooks, masks, and too long."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import SplitError
from pipeloom.splitting.replay import Replay
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients


class Layer(nn.Module):
    def __init__(self, shared=None):
        super().__init__()
        self.linear, self.shared = nn.Linear(8, 8), shared

    def forward(self, x):
        made = x + self.linear(x).tanh()
        if isinstance(self.shared, list):
            self.shared.append(made.square().mean())
        elif self.shared is not None:
            self.shared.scale = made.mean()
        return made


class Model(nn.Module):
    """What ``after`` makes of the output and of what the layers shared."""

    def __init__(self, shared=None, after=lambda x, shared: x):
        super().__init__()
        self.layers, self.shared, self.after = nn.ModuleList(Layer(shared) for _ in range(4)), shared, after

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.after(x, self.shared)


class Masks(nn.Module):
    """Returns a value and a mask that it makes of the model's inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, ids):
        return self.linear(x), (ids > 3).to(x.dtype)[:, None]


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.masks, self.layers = Masks(), nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x, ids):
        x, mask = self.masks(x, ids)
        for layer in self.layers:
            x = layer(x) * mask
        return x


class Hooked(nn.Module):
    """Its code puts a hook on a value, as gradient reversal does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        x = self.layers[0](x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        for layer in self.layers[1:]:
            x = layer(x)
        return x


OPTIONS = {"num_stages": 2, "num_microbatches": 2, "loss_fn": lambda output: output.square().mean()}


def assert_steps_like_the_oracle(model, batches, **more):
    reference = copy.deepcopy(model)
    with pl.Pipeline(model, **OPTIONS | more) as pipe:
        oracle = {key: value for key, value in more.items() if value != "auto"}
        for step_index, batch in enumerate(batches):
            found = pipe.step(*batch)
            assert_bit_equal(
                found, sequential_step(reference, *batch, step_index=step_index, **OPTIONS | oracle), "loss"
            )
        assert_same_gradients(pipe, reference)


def test_a_mask_that_a_unit_returns_is_that_of_each_step():
    """Stages that the unit is not in went on with the mask of the dry run, and gradients were wrong without a word."""
    torch.manual_seed(0)
    batches = [(torch.randn(6, 8), torch.randint(0, 8, (6,))) for _ in range(3)]
    assert_steps_like_the_oracle(Masked(), batches)


def test_a_hook_that_code_puts_on_a_value_runs_once():
    """It ran on the stage that made the value, and again on each that received it."""
    torch.manual_seed(0)
    assert_steps_like_the_oracle(Hooked(), [(torch.randn(6, 8),) for _ in range(3)])


@pytest.mark.parametrize(
    ("shared", "after"),
    [(SimpleNamespace(), lambda x, shared: x * shared.scale), ([], lambda x, shared: x * sum(shared))],
    ids=["object", "list"],
)
def test_an_object_that_stages_would_write_at_the_same_time_is_refused(shared, after):
    pipe = pl.Pipeline(Model(shared, after), **OPTIONS)
    with pytest.raises(
        SplitError, match=r"share an object, 'shared', .* would mix them up\nhint: return them, pass them"
    ):
        pipe.step(torch.randn(4, 8))
    assert not shared if isinstance(shared, list) else not vars(shared)


class Leaves(nn.Module):
    """Leaves the mean of what it makes for a later layer, which takes it: neither is handed it by the model."""

    def __init__(self, shared, takes=False):
        super().__init__()
        self.linear, self.shared, self.takes = nn.Linear(8, 8), shared, takes

    def forward(self, x):
        made = self.linear(x).tanh()
        if self.takes:
            return made * self.shared["mean"]
        self.shared["mean"] = made.mean()
        return made


class Context(nn.Module):
    def __init__(self):
        super().__init__()
        shared = {}
        inner = [nn.Linear(8, 8), Leaves(shared), nn.Linear(8, 8), Leaves(shared, takes=True)]
        self.layers = nn.ModuleList([nn.Linear(8, 8), *inner, nn.Linear(8, 8)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("cuts", [None, "auto", ["layers.1", "layers.5"]])
def test_layers_that_keep_tensors_in_one_object_stay_in_one_stage(cuts):
    """They were refused, whatever the cuts; only cuts between them have to be."""
    torch.manual_seed(0)
    assert_steps_like_the_oracle(Context(), [(torch.randn(4, 8),) for _ in range(2)], cuts=cuts, num_stages=3)


def test_a_cut_between_layers_that_keep_tensors_in_one_object_is_refused_with_the_nearest_that_work():
    pipe = pl.Pipeline(Context(), **OPTIONS | {"cuts": ["layers.3"]})
    with pytest.raises(SplitError, match=r"cut before call 3 \(layers.3\) would separate call 2 .*an object in which"):
        pipe.step(torch.randn(4, 8))
    with pytest.raises(SplitError, match=r"has 4 parts .*, layers\.1, layers\.2 to layers\.4, .*an object in"):
        pl.split(Context(), [torch.randn(4, 8)], num_stages=5)


def test_an_object_that_nobody_keeps_tensors_in_is_fine():
    assert_steps_like_the_oracle(Model(None), [(torch.randn(4, 8),)])
    config = SimpleNamespace(width=8)
    model = Model()
    model.config = model.layers[0].config = config
    assert_steps_like_the_oracle(model, [(torch.randn(4, 8),)])


class Handing(nn.Module):
    """Hands an object from layer to layer, as a key–value cache is, with a tensor that it computed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(4))

    def forward(self, x):
        box = SimpleNamespace(value=x * self.layers[0].scale)
        for layer in self.layers:
            x = layer(x, box)
        return x


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, box):
        return x * self.scale + box.value


def test_a_value_that_comes_inside_of_an_object_is_refused():
    """PEFT's prefix tuning puts its values into a cache: "aten.cat.default needs the numbers of a value of another"."""
    pipe = pl.Pipeline(Handing(), **OPTIONS | {"num_stages": 2})
    with pytest.raises(SplitError, match=r"has 1 part .*: layers\.0 to layers\.3\. .* leaves a tensor elsewhere"):
        pipe.step(torch.randn(4, 8))


def test_nothing_of_a_step_waits_for_the_garbage_collector(monkeypatch):
    """The activations of every micro-batch were part of a cycle, and lived until the collector came by."""
    alive = weakref.WeakSet()
    made = Replay.__init__
    monkeypatch.setattr(Replay, "__init__", lambda self, *args, **kw: (made(self, *args, **kw), alive.add(self))[0])
    gc.disable()
    try:
        with pl.Pipeline(Model(), **OPTIONS) as pipe:
            for _ in range(3):
                pipe.step(torch.randn(4, 8))
            assert len(alive) == 0
    finally:
        gc.enable()


def test_plans_of_old_forms_are_forgotten(monkeypatch):
    monkeypatch.setattr("pipeloom.splitting.cut._MOST_FORMS", 3)
    with pl.Pipeline(Model(), **OPTIONS) as pipe:
        for num_rows in (4, 6, 8, 10, 12, 4):
            pipe.step(torch.randn(num_rows, 8))
        assert len(pipe._assembled.split.cut._plans) == 3


class Routed(nn.Module):
    """Looks at numbers, and leaves a loss of its own on itself, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts, self.aux = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), None

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(weights.argmax(-1) == index)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, index, None])
        self.aux = weights.mean(0).square().sum()
        return x + out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + 0.1 * sum(layer.aux for layer in self.layers)


def test_a_tensor_that_a_module_which_looks_at_numbers_leaves_on_itself_goes_to_its_parent():
    """Its run on made-up numbers left nothing: `int + NoneType`, a TypeError in the user's code."""
    torch.manual_seed(0)
    model, x = Mixture(), torch.randn(8, 8)
    whole = copy.deepcopy(model)
    with pl.Pipeline(model, num_stages=4, num_microbatches=4, loss_fn=lambda loss: loss) as pipe:
        found = pipe.step(x)
        losses = [whole(each) / 4 for each in x.chunk(4)]
        for each in losses:
            each.backward()
        torch.testing.assert_close(found, sum(losses).detach())
        for one, two in zip(pipe.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)


def test_what_a_model_raises_in_its_dry_run_has_a_note_that_says_so():
    """A hook of the user's fills a dict that the model reads: a bare `KeyError`, and the loop before had worked."""
    kept = {}

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.layers[0].register_forward_hook(lambda module, args, output: kept.update(first=output))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x + kept["first"]

    with (
        pytest.raises(KeyError, match="first") as caught,
        pl.Pipeline(Reads(), num_stages=2, num_microbatches=2, loss_fn=lambda y: y.mean()) as pipe,
    ):
        pipe.step(torch.randn(4, 8))
    assert any("to see how to cut it" in note and "hooks" in note for note in caught.value.__notes__)
