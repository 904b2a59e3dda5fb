"""Frozen modules inside a stage that trains: torch's fused paths are taken as in an un-pipelined model."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, has_torch_function
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from pipeloom.halves import Halves, frozen_in
from pipeloom.testing import sequential_step
from tests.halves.both import Calls, draw, run_whole, same, same_gradients, seeds_of
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients

WIDTH = 32


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().requires_grad_(requires_grad=False)


class Probe(nn.Module):
    """A frozen encoder, deep inside of what trains."""

    def __init__(self, is_checkpointed=False, is_after=False):
        super().__init__()
        self.body, self.head = nn.ModuleDict({"encoder": encoder()}), nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH) if is_after else nn.Identity()
        self.is_checkpointed = is_checkpointed

    def _whole(self, x):
        return self.head(self.body["encoder"](self.first(x)))

    def forward(self, x):
        return checkpoint(self._whole, x, use_reentrant=False) if self.is_checkpointed else self._whole(x)


def run(model, x, frozen):
    halves = Halves(frozen)
    with halves.forward():
        output = model(x)
    with halves.input_gradients():
        output.backward(*seeds_of([output]))
    halves.weight_gradients()
    return output


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_frozen_encoder_takes_its_fast_path(is_checkpointed, is_after):
    """Under the mode the slow one was taken, which was 7e-7 off."""
    model, x = Probe(is_checkpointed, is_after), draw(2, 5, WIDTH)
    assert model.body["encoder"] in frozen_in(model)
    whole = copy.deepcopy(model)
    _, (expected,) = run_whole(whole, [x])
    same([run(model, x, frozen_in(model))], [expected])
    same_gradients(model, whole)
    assert all("_compiled_call_impl" not in vars(each) for each in model.modules())


@pytest.mark.parametrize("cuts", [None, ["head"]])
@pytest.mark.parametrize("recompute", [False, True])
def test_in_a_pipeline(cuts, recompute):
    torch.manual_seed(1)
    model = nn.Sequential(Probe(), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    reference, (x, target) = copy.deepcopy(model), (draw(6, 5, WIDTH), draw(6, 5, 3))
    options = {"loss_fn": functional.mse_loss, "num_microbatches": 3}
    options |= {"num_stages": 2} if cuts is None else {"cuts": ["0.head"]}
    with pl.Pipeline(model, schedule="zb-h1", recompute=recompute, verify=True, **options) as pipe:
        for step_index in range(2):
            loss = pipe.step(x, target=target)
            expected = sequential_step(reference, x, target=target, step_index=step_index, **options)
            assert_bit_equal(loss, expected, "loss")
            assert_same_gradients(pipe, reference)
        assert pipe.first_step.comparison.is_bit_equal


class Asks(nn.Module):
    """Notes whether somebody looks at torch functions."""

    def __init__(self):
        super().__init__()
        self.scale, self.seen = nn.Parameter(torch.ones(()), requires_grad=False), []

    def forward(self, x, weight=None):
        self.seen.append(has_torch_function((x,)))
        return functional.linear(x, x.new_ones(WIDTH, WIDTH) if weight is None else weight) * self.scale


class Other(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_modes_of_others_stay():
    asks = Asks()
    halves = Halves([asks])
    with halves.forward():
        asks(draw(3, WIDTH))
        with Other():
            asks(draw(3, WIDTH))
            assert has_torch_function((draw(1),))
        assert has_torch_function((draw(1),))
    asks(draw(3, WIDTH))
    assert asks.seen == [False, True, False]


def test_the_mode_comes_back_after_an_error():
    asks = Asks()
    halves = Halves([asks])
    with halves.forward():
        with pytest.raises(TypeError):
            asks()
        assert has_torch_function((draw(1),))


def test_a_weight_that_is_handed_in_is_split_as_ever():
    asks = Asks()
    model = Calls(lambda self, x: self.asks(x, weight=self.weight), weight=draw(WIDTH, WIDTH))
    model.asks = asks
    assert frozen_in(model) == (asks,)
    halves, x = Halves(frozen_in(model)), draw(64, WIDTH, grad=True)
    with halves.forward():
        output = model(x)
    with halves.input_gradients():
        output.backward(*seeds_of([output]))
    assert halves.num_waiting == 1
    assert asks.seen == [True]


def test_what_counts_as_frozen():
    frozen = encoder()
    kinds = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
    found = [each for each in frozen_in(nn.Sequential(frozen, nn.Linear(2, 2))) if isinstance(each, kinds)]
    assert found == [each for each in frozen.modules() if isinstance(each, kinds)]
    assert frozen_in(nn.Sequential(nn.GELU(), nn.Linear(2, 2))) == ()
    assert frozen_in(nn.Linear(2, 2).requires_grad_(requires_grad=False)) == ()


@pytest.mark.parametrize("how", ["module", "wrapper", "forward"])
def test_code_that_is_compiled_is_left_alone(how):
    model = nn.Sequential(encoder(), nn.Linear(WIDTH, 2))
    if how == "module":
        model.compile(backend="eager")
    elif how == "wrapper":
        model = torch.compile(model, backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    assert frozen_in(model) == ()
