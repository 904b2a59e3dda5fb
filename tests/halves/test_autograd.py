"""Hooks, errors, and what else code may do with autograd in a forward or a backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom.errors import RuntimeStateError
from pipeloom.halves import Halves
from tests.halves.both import Calls, check, draw, run_halves, run_whole, same, same_gradients


def two_layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 40), nn.GELU(), nn.Linear(40, 32))


def test_parameters_have_no_gradient_before_w() -> None:
    model = two_layers()
    _, _, halves = run_halves(model, [draw(4, 32, grad=True)])
    assert all(each.grad is None for each in model.parameters())
    assert halves.num_waiting == 2
    halves.weight_gradients()
    assert all(each.grad is not None for each in model.parameters())


def test_w_before_i_does_nothing() -> None:
    model, halves = two_layers(), Halves()
    with halves.forward():
        model(draw(4, 32))
    halves.weight_gradients()
    assert all(each.grad is None for each in model.parameters())


def test_gradients_that_were_there_are_added_to() -> None:
    model = two_layers()
    for each in model.parameters():
        each.grad = torch.full_like(each, 0.1)
    whole = copy.deepcopy(model)
    for each, other in zip(whole.parameters(), model.parameters(), strict=True):
        each.grad = None if other.grad is None else other.grad.clone()
    run_whole(whole, [draw(4, 32, grad=True)])
    run_halves(model, [draw(4, 32, grad=True)])[2].weight_gradients()
    same_gradients(model, whole)


def test_accumulates_in_another_type() -> None:
    model = two_layers().to(torch.bfloat16)
    for each in model.parameters():
        each.grad_dtype = torch.float32
    whole = copy.deepcopy(model)
    for each in whole.parameters():
        each.grad_dtype = torch.float32
    args = [draw(4, 32, dtype=torch.bfloat16, grad=True)]
    run_whole(whole, args)
    run_halves(model, args)[2].weight_gradients()
    same_gradients(model, whole)
    assert model[0].weight.grad.dtype == torch.float32


def test_hooks_of_parameters_fire_in_w() -> None:
    """Each once for a micro-batch, with the sum over all uses, as the whole backward does."""
    seen: list[Any] = []
    model = Calls(lambda m, x: F.linear(torch.tanh(F.linear(x, m.w)), m.w), w=draw(32, 32) / 6)
    whole = copy.deepcopy(model)
    for each in (model, whole):
        each.w.register_hook(lambda grad: grad * 2)
        each.w.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    args = [draw(4, 32, grad=True)]
    run_whole(whole, args)
    _, _, halves = run_halves(model, args)
    assert len(seen) == 1
    halves.weight_gradients()
    assert len(seen) == 2
    same(seen[1:], seen[:1])


def test_hooks_of_activations_fire_in_i() -> None:
    """Those on the output of what is split too, before its gradient is kept for W: they may change it."""

    def body(m: Any, x: Tensor) -> Tensor:
        hidden = F.linear(x, m.w)
        hidden.register_hook(lambda grad: grad.clamp(-1, 1))
        hidden.retain_grad()
        return F.linear(hidden, m.w)

    check(Calls(body, w=draw(32, 32)), draw(4, 32, grad=True), waiting=2)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_modules() -> None:
    model = two_layers()
    for layer in model:
        layer.register_full_backward_hook(lambda _, grads, __: tuple(each * 2 for each in grads if each is not None))
        layer.register_full_backward_pre_hook(lambda _, grads: (grads[0] + 1,))
    check(model, draw(4, 32, grad=True), waiting=2)


def test_output_that_is_not_used() -> None:
    model = Calls(lambda m, x: (F.linear(x, m.w), F.linear(x, m.v))[0], w=draw(32, 32), v=draw(32, 32))
    check(model, draw(4, 32, grad=True), waiting=1)


def test_outputs_in_place() -> None:
    model = Calls(lambda m, x: F.relu_(F.linear(x, m.w).mul_(2).add_(F.linear(x, m.w))), w=draw(32, 32))
    check(model, draw(4, 32, grad=True), waiting=2)


def test_write_into_what_w_needs() -> None:
    """As in the whole backward, autograd notices."""

    def body(m: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(x).clone()
        out = F.linear(hidden, m.w)
        hidden.mul_(2)
        return out

    _, _, halves = run_halves(Calls(body, w=draw(32, 32)), [draw(4, 32, grad=True)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        halves.weight_gradients()


def test_input_as_output() -> None:
    check(Calls(lambda m, x: (x, F.linear(x, m.w), x * 1), w=draw(32, 32)), draw(4, 32, grad=True), waiting=1)


def test_several_backwards_in_one_i() -> None:
    """A stage whose outputs go back one by one."""
    whole, args = two_layers(), draw(4, 32)
    model, halves = copy.deepcopy(whole), Halves()
    for each in (whole(args), whole(args * 2)):
        each.sum().backward()
    with halves.forward():
        outputs = model(args), model(args * 2)
    with halves.input_gradients():
        for each in outputs:
            each.sum().backward()
    halves.weight_gradients()
    same_gradients(model, whole)


def test_differentiating_twice_is_refused() -> None:
    model, halves, x = two_layers(), Halves(), draw(4, 32, grad=True)
    with halves.forward():
        loss = model(x).square().sum()
    with (
        halves.input_gradients(),
        pytest.raises(RuntimeStateError, match=r"differentiated again \(create_graph=True\)"),
    ):
        torch.autograd.grad(loss, x, create_graph=True)


def test_backward_in_a_forward_is_refused() -> None:
    """Nobody would say when its weights are due."""
    model, halves, x = two_layers(), Halves(), draw(4, 32, grad=True)
    with halves.forward(), pytest.raises(RuntimeStateError, match="it was not I"):
        model(x).sum().backward()


def test_second_backward_is_refused() -> None:
    model, halves, x = two_layers(), Halves(), draw(4, 32, grad=True)
    with halves.forward():
        loss = model(x).sum()
    with halves.input_gradients():
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeStateError, match="a second backward"), halves.input_gradients():
        loss.backward()


def test_nothing_waits_after_an_error() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ZeroDivisionError

    model, halves = two_layers(), Halves()
    with halves.forward():
        loss = model(Broken.apply(draw(4, 32, grad=True))).sum()
    with pytest.raises(ZeroDivisionError), halves.input_gradients():
        loss.backward()
    assert halves.num_waiting == 0


TRANSFORMED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "vmap": lambda m, x: torch.func.vmap(lambda row: F.linear(row, m.w))(x),
    "gradient": lambda m, x: torch.func.grad(lambda y: F.linear(y, m.w).square().sum())(x),
    "jvp": lambda m, x: torch.func.jvp(lambda y: F.linear(y, m.w), (x,), (x,))[1],
}


@pytest.mark.filterwarnings("ignore:`?torch")
@pytest.mark.parametrize("name", TRANSFORMED)
def test_torch_func_stays_whole(name: str) -> None:
    check(Calls(TRANSFORMED[name], w=draw(32, 32)), draw(4, 32, grad=True), waiting=0)


def test_other_tensor_types_stay_whole() -> None:
    class Other(Tensor):
        pass

    check(Calls(lambda m, x: F.linear(x.as_subclass(Other), m.w).as_subclass(Tensor), w=draw(32, 32)),
          draw(4, 32, grad=True), waiting=0)  # fmt: skip


def test_functional_call() -> None:
    model = two_layers()
    doubled = Calls(lambda m, x: torch.func.functional_call(
        m.inner, {name: each * 2 for name, each in m.inner.named_parameters()}, (x,)
    ))  # fmt: skip
    doubled.inner = model
    check(doubled, draw(4, 32, grad=True))


@pytest.mark.parametrize("is_dropping", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_transformer(norm_first: bool, is_dropping: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1 * is_dropping, batch_first=True, norm_first=norm_first)
    check(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), draw(2, 5, 32, grad=True), waiting=8)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 48, "vdim": 32}], ids=str)
def test_attention(options: dict[str, Any]) -> None:
    """One function for a mode, in Python; it is looked into."""
    keys = draw(2, 6, options.get("kdim", 32), seed=2)
    model = Calls(lambda m, x: m.inner(x, keys, keys[..., :32], need_weights=True))
    model.inner = nn.MultiheadAttention(32, 4, batch_first=True, **options)
    check(model, draw(2, 5, 32, grad=True))


def test_attention_calls_what_the_user_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: (calls.append(1), attention(*a, **k))[1])
    model = Calls(lambda m, x: m.inner(x, x, x, need_weights=False)[0])
    model.inner = nn.MultiheadAttention(32, 4, batch_first=True)
    check(model, draw(2, 5, 32, grad=True), waiting=2, num_microbatches=1)
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore")
def test_compiled_module_stays_whole() -> None:
    """Its code has the bits of the compiled module without us, and what is around it is split."""
    model = nn.Sequential(nn.Linear(32, 32), torch.compile(two_layers(), backend="aot_eager"), nn.Linear(32, 32))
    check(model, draw(4, 32, grad=True), waiting=2)


@pytest.mark.filterwarnings("ignore")
def test_compiled_in_place() -> None:
    model = nn.Sequential(nn.Linear(32, 32), two_layers())
    model[1].compile(backend="aot_eager")
    whole = copy.deepcopy(model)
    whole[1].compile(backend="aot_eager")
    args = [draw(4, 32, grad=True)]
    run_whole(whole, args)
    _, _, halves = run_halves(model, args)
    assert halves.num_waiting == 1
    halves.weight_gradients()
    same_gradients(model, whole)
