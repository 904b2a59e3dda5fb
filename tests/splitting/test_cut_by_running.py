"""A model cut by running it, stage by stage: hooks, checkpoints, custom functions, wrapped forwards, other inputs."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from pipeloom.errors import SplitError
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients

OPTIONS = {"num_stages": 3, "num_microbatches": 2, "loss_fn": lambda output: output.square().mean()}


class Plain(nn.Module):
    """Four layers and a head, in a forward of its own."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Outer(nn.Module):
    """A parent that spans stages."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = Plain(), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.inner(x))


def assert_like_plain_torch(model, **options):
    """A step of three stages, and the loop that anybody writes."""
    reference, x, options = copy.deepcopy(model), torch.randn(4, 8), {**OPTIONS, **options}
    with pl.Pipeline(model, **options) as pipe:
        loss = pipe.step(x)
        for part in x.chunk(2):
            (options["loss_fn"](reference(part)) / 2).backward()
        assert_same_gradients(pipe, reference)
    return loss


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y * 2

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y * 2, grad * x * 2


class WithFunctions(Plain):
    def forward(self, x):
        first = self.layers[0](x)
        second = Double.apply(first, self.layers[1](first))
        return self.head(Double.apply(second, self.layers[2](first)))


class WithCheckpoints(Plain):
    def __init__(self, is_reentrant, is_whole):
        super().__init__()
        self.is_reentrant, self.is_whole = is_reentrant, is_whole

    def run(self, x, layers):
        for layer in layers:
            x = torch.tanh(layer(x)) + x
        return x

    def forward(self, x):
        groups = [self.layers] if self.is_whole else [[layer] for layer in self.layers]
        for group in groups:
            x = checkpoint(self.run, x, group, use_reentrant=self.is_reentrant)
        return self.head(x)


class WithContexts(Plain):
    def forward(self, x):
        with torch.no_grad():
            frozen = self.layers[1](self.layers[0](x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = self.layers[2](x)
        return self.head(frozen + cast.float() + self.layers[3](x))


class WithAttributes(Plain):
    def forward(self, x):
        self.first = self.layers[0](x)
        self.by_name = {"second": self.layers[1](self.first)}
        return self.head(self.layers[3](self.layers[2](self.by_name["second"])) + self.first)


class WithParameterReturned(Plain):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return {"output": super().forward(x), "scale": self.scale}


@pytest.mark.parametrize(
    "make",
    [
        Plain,
        WithFunctions,
        WithContexts,
        WithAttributes,
        *[functools.partial(WithCheckpoints, False, whole) for whole in (True, False)],
    ],
    ids=["plain", "functions", "contexts", "attributes", "checkpoint whole", "checkpoints"],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_parents_code_does_leaves_gradients_as_they_are(make, recompute):
    assert torch.isfinite(assert_like_plain_torch(make(), recompute=recompute))


def test_a_reentrant_checkpoint_needs_no_input_that_requires_a_gradient():
    """Plain torch loses the gradients of the layers in it, with a warning."""
    model = WithCheckpoints(True, is_whole=True)
    with pl.Pipeline(model, **OPTIONS) as pipe:
        pipe.step(torch.randn(4, 8))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_parameter_may_be_returned():
    model = WithParameterReturned()
    options = {**OPTIONS, "loss_fn": lambda output: output["output"].square().mean() * output["scale"]}
    assert_like_plain_torch(model, **options)


def test_hooks_on_a_parent_fire_once_where_its_first_and_last_units_are():
    model, calls = Outer(), []
    model.inner.register_forward_pre_hook(lambda module, given: calls.append(("before", module, given[0].shape)))
    model.inner.register_forward_hook(lambda module, given, out: calls.append(("after", module, out.sum().item())))
    with pl.Pipeline(model, **OPTIONS) as pipe:
        pipe.step(torch.randn(4, 8))
    assert sorted(call[0] for call in calls) == ["after", "after", "before", "before"]
    assert {id(call[1]) for call in calls} == {id(model.inner)}


def test_a_hook_that_is_put_on_later_fires_too():
    model, calls = Outer(), []
    with pl.Pipeline(model, **OPTIONS) as pipe:
        pipe.step(torch.randn(4, 8))
        handle = model.inner.register_forward_hook(lambda *_: calls.append(1))
        pipe.step(torch.randn(4, 8))
        handle.remove()
        pipe.step(torch.randn(4, 8))
    assert len(calls) == 2


def test_a_hook_of_the_whole_model_may_change_its_output():
    model = Outer()
    model.register_forward_hook(lambda module, given, out: out * 3)
    assert_like_plain_torch(model)


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (
            lambda m: m.register_forward_pre_hook(lambda *_: (torch.ones(2, 8),)),
            "pre-hook on inner returned a value",
        ),
        (lambda m: m.register_forward_hook(lambda *_: torch.ones(2, 8)), "a forward hook on inner returned a value"),
        (lambda m: m.register_full_backward_hook(lambda *_: None), "inner has a backward hook"),
    ],
    ids=["before", "after", "backward"],
)
def test_a_hook_that_would_change_what_crosses_is_refused_by_name(put, said):
    model = Outer()
    put(model.inner)
    with pl.Pipeline(model, **OPTIONS) as pipe, pytest.raises(SplitError, match=said):
        pipe.step(torch.randn(4, 8))


def test_hooks_of_units_fire_as_they_do_without_a_pipeline():
    model, calls = Plain(), []
    model.layers[1].register_forward_hook(lambda module, given, out: calls.append("forward") or out * 2)
    model.layers[2].register_full_backward_hook(lambda *_: calls.append("backward"))
    assert_like_plain_torch(model)
    assert sorted(calls) == ["backward"] * 4 + ["forward"] * 4  # twice two micro-batches: the reference has them too


def test_a_forward_that_was_wrapped_is_cut_within_the_wrapper():
    model, x = Plain(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    inner = model.forward
    model.forward = functools.wraps(inner)(lambda *args: inner(*args) * 2)
    with pl.Pipeline(model, **OPTIONS) as pipe:
        loss = pipe.step(x)
    torch.testing.assert_close(loss, (plain(x) * 2).square().mean().detach())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.compile(Plain(), backend="eager"), "compiled whole by torch.compile"),
        (lambda: nn.ModuleDict({"lazy": nn.LazyLinear(8)}), "belongs to a lazy layer"),
    ],
    ids=["compiled", "lazy"],
)
def test_what_cannot_be_run_without_numbers_is_refused_by_name(make, said):
    with pl.Pipeline(make(), **OPTIONS) as pipe, pytest.raises(SplitError, match=said):
        pipe.step(torch.randn(4, 8))


class Branches(nn.Module):
    """Calls its units in an order that an argument decides."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, way="all"):
        if way == "all":
            return self.third(self.second(self.first(x)))
        return self.third(self.first(x)) if way == "skip" else self.first(self.third(x))


def test_a_way_that_skips_a_unit_runs_the_others_where_they_are():
    model, x = Branches(), torch.randn(4, 8)
    oracle = copy.deepcopy(model)
    with pl.Pipeline(model, **OPTIONS) as pipe:
        pipe.step(x)
        pipe.zero_grad()
        found = pipe.step(x, way="skip")
    assert_bit_equal(found, sequential_step(oracle, x, **OPTIONS | {"num_stages": 2}, way="skip"), "loss")
    assert model.second.weight.grad is None


def test_a_way_that_goes_back_is_refused_with_the_units_name():
    with pl.Pipeline(Branches(), **OPTIONS) as pipe:
        pipe.step(torch.randn(4, 8))
        with pytest.raises(SplitError, match="calls 'first' of stage 0 after units of stage 2"):
            pipe.step(torch.randn(4, 8), way="back")


class WritesItsInput(Plain):
    def forward(self, x):
        x += 1
        return super().forward(x)


def test_inputs_that_the_code_writes_into_are_written_once_by_each_stage_and_stay_the_users():
    model, x = WritesItsInput(), torch.randn(4, 8)
    reference, kept = copy.deepcopy(model), x.clone()
    with pl.Pipeline(model, **OPTIONS) as pipe:
        loss = pipe.step(x)
    assert torch.equal(x, kept)
    torch.testing.assert_close(loss, reference(x).square().mean().detach())
