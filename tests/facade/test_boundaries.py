"""What may cross a cut: tensors and containers of them, however the layers on both sides use them."""

import copy
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import pipeloom as pl
from tests.facade.models import (
    WIDTH,
    Calls,
    assert_pipelined_like_plain,
    assert_same,
    chain,
    gradients,
    linears,
    mean_square,
    plain_loop,
    rows,
)

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Parts:
    """A container that torch's pytree does not know."""

    tensor: torch.Tensor
    name: str
    nothing: None = None


CROSSINGS = {
    "tuple": (lambda x: (x, x * 2), lambda v: v[0] * v[1]),
    "dict": (lambda x: {"a": x, "b": x.exp()}, lambda v: v["a"] + v["b"]),
    "nested": (lambda x: {"a": [x, (x * 2, {"b": x * 3})]}, lambda v: v["a"][0] + v["a"][1][1]["b"]),
    "named tuple": (lambda x: Pair(x, x.sin()), lambda v: v.left * v.right),
    "dataclass": (lambda x: Parts(x * 3, "three"), lambda v: v.tensor * len(v.name)),
    "None and numbers": (lambda x: (x, None, 3, 0.5, "text", True), lambda v: v[0] * v[2] * v[3]),
    "the same tensor twice": (lambda x: (x, x), lambda v: v[0] * v[1].detach() + v[1]),
    "a view and its base": (lambda x: (x, x[:, :2]), lambda v: v[0] * v[1].sum()),
    "integers": (lambda x: (x, x.argmax(-1)), lambda v: v[0] * v[1][:, None]),
    "mask": (lambda x: (x, x > 0), lambda v: v[0].masked_fill(v[1], 0.0)),
    "an output that nobody uses": (lambda x: (x, x * 7), lambda v: v[0]),
    "no row": (lambda x: (x, x.mean()), lambda v: v[0] * v[1]),
    "not contiguous": (lambda x: x.t(), lambda v: v.t()),
    "complex": (lambda x: torch.complex(x, x * 2), lambda v: v.abs()),
    "empty container": (lambda x: (x, (), {}), lambda v: v[0]),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("crossing", CROSSINGS)
def test_containers_cross_cuts(crossing, recompute):
    packed, unpacked = CROSSINGS[crossing]
    model = chain(nn.Linear(WIDTH, WIDTH), Calls(packed), Calls(unpacked), nn.Linear(WIDTH, 3))
    assert_pipelined_like_plain(model, rows(7), cuts=[1, 2, 3], recompute=recompute)


class Merge(nn.Module):
    """Takes two values; with names that fit a dict's keys."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, left, right):
        return self.linear(left * right)


class MergeByName(Merge):
    def forward(self, *, left, right):
        return super().forward(left, right)


class MergeMaybe(Merge):
    def forward(self, left, right=None):
        return super().forward(left, left if right is None else right)


class MergeAll(Merge):
    def forward(self, *values):
        return super().forward(*values)


class MergeWhole(Merge):
    def forward(self, pair):
        left, right = pair.values() if isinstance(pair, dict) else pair
        return super().forward(left, right)


class MergeWholeOrScaled(Merge):
    def forward(self, batch, scale=1.0):
        return super().forward(batch["left"] * scale, batch["right"])


AS_TUPLE = lambda x: (x, x * 2)  # noqa: E731
AS_DICT = lambda x: {"left": x, "right": x * 2}  # noqa: E731


@pytest.mark.parametrize(
    ("packed", "last"),
    [
        (AS_TUPLE, Merge),
        (AS_TUPLE, MergeMaybe),
        (AS_TUPLE, MergeAll),
        (AS_TUPLE, MergeWhole),
        (AS_DICT, Merge),
        (AS_DICT, MergeByName),
        (AS_DICT, MergeMaybe),
        (AS_DICT, MergeWhole),
        (AS_DICT, MergeWholeOrScaled),
    ],
)
def test_stage_modules_take_containers_whole_or_unpacked(packed, last):
    first, last = chain(nn.Linear(WIDTH, WIDTH), Calls(packed)), last()
    plain_first, plain_last = copy.deepcopy(first), copy.deepcopy(last)
    with pl.Pipeline([first, last], num_microbatches=3, loss_fn=mean_square) as pipe:
        pipe.step(rows(6))
        found = gradients(pipe)
    plain_loop(lambda x: plain_last.linear(plain_first[0](x) * plain_first[0](x) * 2), [rows(6)], 3)
    assert found["1.linear.weight"].allclose(plain_last.linear.weight.grad)
    assert found["0.0.weight"].allclose(plain_first[0].weight.grad)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "in_place",
    [nn.ReLU(inplace=True), nn.LeakyReLU(0.1, inplace=True), Calls(lambda x: x.mul_(2)), Calls(lambda x: x.t_().t_())],
)
def test_in_place_first_layers(in_place, recompute):
    model = chain(nn.Linear(WIDTH, WIDTH), in_place, nn.Linear(WIDTH, WIDTH), in_place, nn.Linear(WIDTH, 3))
    assert_pipelined_like_plain(model, rows(8), cuts=[1, 3], recompute=recompute)


def test_in_place_layer_that_spoils_the_stage_before():
    """Sigmoid needs its output again: torch refuses this uncut, and so it must when a cut lies between."""
    model = chain(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), Calls(lambda x: x.mul_(2)))
    with (
        pl.Pipeline(model, cuts=[2], num_microbatches=2, loss_fn=mean_square) as pipe,
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        pipe.step(rows(4))
    assert all(gradient is None for gradient in gradients(model).values())


def test_identity_stages_hand_on():
    model = chain(nn.Identity(), nn.Linear(WIDTH, 3), nn.Identity(), nn.Identity())
    assert_pipelined_like_plain(model, rows(5), cuts=[1, 2, 3])


def test_stages_without_gradients():
    """Tokens into a frozen embedding: nothing goes back over the first cut, and nobody waits for it."""
    model = chain(nn.Embedding(9, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    tokens = torch.arange(14).remainder(9).reshape(7, 2)
    assert_pipelined_like_plain(model, tokens, cuts=[1, 2])
    assert model[0].weight.grad is None


def test_gradient_stops_in_the_middle():
    model = chain(nn.Linear(WIDTH, WIDTH), Calls(torch.Tensor.detach), nn.Linear(WIDTH, 3))
    assert_pipelined_like_plain(model, rows(6), cuts=[1, 2])
    assert model[0].weight.grad is None


def test_packed_sequences_cross():
    """A container of torch's own with a constructor of its own."""

    def packed(x):
        return nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 1]), batch_first=True)

    def last(value):
        return nn.utils.rnn.pad_packed_sequence(value[0], batch_first=True)[0]

    model = chain(nn.Linear(WIDTH, WIDTH), Calls(packed), nn.LSTM(WIDTH, 3), Calls(last))
    assert_pipelined_like_plain(model, torch.randn(6, 2, WIDTH), num_microbatches=3, cuts=[2, 3])


def test_object_that_hides_tensors_is_refused():
    model = chain(nn.Linear(WIDTH, WIDTH), Calls(lambda x: iter([x])), Calls(next))
    message = r"a stage returned a list_iterator; .*hint: return its tensors.*"
    with pl.Pipeline(model, cuts=[2], num_microbatches=1) as pipe:
        with pytest.raises(pl.errors.BatchError, match="(?s)" + message) as caught:
            pipe.step(rows(2))
        assert "stage 0, micro-batch 0" in caught.value.__notes__[-1]
        pipe.close()


def test_parameter_that_is_the_output():
    """A stage may return its own parameter: a class token, say."""

    class Token(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.ones(1, WIDTH))

        def forward(self, x):
            return x, self.token

    model = chain(nn.Linear(WIDTH, WIDTH), Token(), Calls(lambda v: v[0] * v[1]), nn.Linear(WIDTH, 3))
    assert_pipelined_like_plain(model, rows(6), cuts=[2, 3])
    assert model[1].token.grad is not None


def test_inputs_of_any_kind_reach_the_first_stage():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, tokens, scale, *, mask=None, mode="plain"):
            assert mode == "loud"
            return self.linear(tokens.float()) * scale * mask

    model = chain(Takes(), nn.Linear(WIDTH, 3))
    tokens, mask = torch.arange(24).reshape(6, WIDTH), torch.ones(6, WIDTH).bool()
    with pl.Pipeline(model, num_stages=2, num_microbatches=3, loss_fn=mean_square) as pipe:
        loss = pipe.step(tokens, torch.tensor(2.0), mask=mask, mode="loud")
        expected = mean_square(model[1](model[0](tokens, 2.0, mask=mask, mode="loud")))
    assert loss.allclose(expected)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("loss_fn", [mean_square, lambda output: (output.square().sum(), output.numel())])
def test_inputs_that_require_grad(loss_fn, recompute):
    """Their gradient is that of the whole batch's loss, whether it is scaled before or after the backward."""
    model, given = linears(2), rows(6).requires_grad_()
    expected = torch.autograd.grad(mean_square(model(given)), given)[0]
    with pl.Pipeline(model, num_stages=2, num_microbatches=3, loss_fn=loss_fn, recompute=recompute) as pipe:
        pipe.step(given)
        assert given.grad.allclose(expected)
        pipe.step(given)
    assert given.grad.allclose(2 * expected)


def test_inputs_with_a_graph_of_their_own():
    """A layer outside the pipeline runs once, so its backward has to run once, after all micro-batches."""
    outside, model = nn.Linear(WIDTH, WIDTH), linears(2)
    expected = torch.autograd.grad(mean_square(model(outside(rows(6)).tanh())), outside.weight)[0]
    with pl.Pipeline(model, num_stages=2, num_microbatches=3, loss_fn=mean_square) as pipe:
        pipe.step(outside(rows(6)).tanh())
    assert outside.weight.grad.allclose(expected)
    assert model[0].weight.grad is not None


def test_inputs_keep_their_gradient_when_a_step_fails():
    def fails(x):
        raise ValueError("late")

    model, given = chain(nn.Linear(WIDTH, WIDTH), Calls(fails)), rows(4).requires_grad_()
    with pl.Pipeline(model, num_stages=2, num_microbatches=2) as pipe, pytest.raises(ValueError, match="late"):
        pipe.step(given)
    assert given.grad is None


def test_target_with_a_graph_is_refused():
    with pl.Pipeline(linears(2), num_stages=2, num_microbatches=2, loss_fn=nn.MSELoss()) as pipe:
        with pytest.raises(pl.errors.LossError, match=r"the target requires a gradient.*\n.*detach"):
            pipe.step(rows(4), target=rows(4).requires_grad_())
        assert torch.isfinite(pipe.step(rows(4), target=rows(4)))


def test_bits_do_not_depend_on_what_crosses():
    """The same function written with a tuple boundary or without."""
    one, other = linears(2), linears(2)
    with pl.Pipeline(one, num_stages=2, num_microbatches=2, loss_fn=mean_square) as pipe:
        pipe.step(rows(4))
    wrapped = nn.Sequential(one.__class__(other[0], Calls(lambda x: (x, x.detach()))), Calls(lambda v: other[1](v[0])))
    with pl.Pipeline(wrapped, num_stages=2, num_microbatches=2, loss_fn=mean_square) as pipe:
        pipe.step(rows(4))
    assert_same(gradients(one), gradients(other))


@pytest.mark.parametrize("recompute", [False, True])
def test_expanded_tensors_cross(recompute):
    """One row stands for many: it cannot be copied element by element."""
    model = chain(nn.Linear(WIDTH, WIDTH), Calls(lambda x: (x, x[:1].expand_as(x))), Calls(lambda v: v[0] * v[1]))
    assert_pipelined_like_plain(model, rows(6), cuts=[1, 2], recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
def test_inputs_made_in_inference_mode(recompute):
    """A frozen first layer takes them, as it does in the whole model."""
    with torch.inference_mode():
        tokens = torch.arange(6)
    model = chain(nn.Embedding(9, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 3))
    with pl.Pipeline(model, num_stages=2, num_microbatches=3, loss_fn=mean_square, recompute=recompute) as pipe:
        assert torch.isfinite(pipe.step(tokens))
        assert model[1].weight.grad is not None


class Hooked(nn.Module):
    """Changes the gradient of its input by a hook."""

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda grad: 3 * grad)
        return x.sum(-1, keepdim=True)  # whose gradient comes expanded


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_hook_on_a_stages_input_counts(schedule):
    model, x = nn.Sequential(nn.Linear(32, 32), Hooked()), torch.ones(8, 32)
    whole = copy.deepcopy(model)
    with pl.Pipeline(model, num_stages=2, schedule=schedule, num_microbatches=4, loss_fn=torch.mean) as pipe:
        for _ in range(2):  # the first step finds out that the stage only reads its input
            pipe.step(x)
            torch.autograd.backward([whole(part).mean() / 4 for part in x.chunk(4)])
        gradients = [(each.grad, other.grad) for each, other in zip(pipe.parameters(), whole.parameters(), strict=True)]
        assert all(torch.equal(one, other) for one, other in gradients)
