"""`torch.utils.checkpoint` in the forward: recomputed once, for I and W together, to the bits of the whole backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tests.halves.both import Calls, check, draw, leaves_of, run_halves, run_whole

WAYS: list[Any] = [
    pytest.param({"use_reentrant": False}, id="hooks"),
    pytest.param({"use_reentrant": True}, id="reentrant"),
    pytest.param({"use_reentrant": False, "early_stop": False}, id="hooks, to the end"),
]


class Block(nn.Module):
    """Attention and a feed-forward with dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).movedim(-3, 0).transpose(-2, -3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2))
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class Checkpointed(nn.Module):
    """Blocks, so many of them in one checkpoint."""

    def __init__(self, blocks: nn.Module, per_checkpoint: int = 1, **options: Any) -> None:
        super().__init__()
        self.blocks, self.per_checkpoint, self.options = blocks, per_checkpoint, options

    def forward(self, x: Tensor) -> Any:
        blocks: Any = self.blocks
        for start in range(0, len(blocks), self.per_checkpoint):
            x = checkpoint(nn.Sequential(*blocks[start : start + self.per_checkpoint]), x, **self.options)
        return x


def blocks(count: int, width: int = 32) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList([Block(width) for _ in range(count)])


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("per_checkpoint", [1, 3])
def test_checkpointed_blocks(options: dict[str, Any], per_checkpoint: int) -> None:
    check(Checkpointed(blocks(3), per_checkpoint, **options), draw(2, 5, 32, grad=True), waiting=12)


@pytest.mark.parametrize("options", WAYS)
def test_under_autocast(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Tanh(), Checkpointed(blocks(2), **options), nn.Linear(32, 32))
    check(model, draw(2, 5, 32, grad=True), context=lambda: torch.autocast("cpu", torch.bfloat16))


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("count", [2, 4])
def test_one_block_many_times(options: dict[str, Any], count: int) -> None:
    """ALBERT shares one block: with hooks its gradients add up first, with reentrant ones each joins ``.grad``."""
    (block,) = blocks(1)
    model = nn.Sequential(nn.Linear(32, 32), Checkpointed(nn.ModuleList([block] * count), **options))
    check(model, draw(2, 5, 32, grad=True), waiting=4 * count + 1)


@pytest.mark.parametrize("options", WAYS)
def test_weight_in_and_around_a_checkpoint(options: dict[str, Any]) -> None:
    """With hooks, uses before, inside and after add up in the order of the forward.

    With a reentrant one, what comes first in the whole backward depends on where the uses around it are.
    """

    def body(m: Any, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, m.w))
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(F.linear(torch.tanh(F.linear(y, m.w)), m.w)), x, **options)
        return F.linear(x, m.w)

    check(Calls(body, w=draw(32, 32) / 6), draw(4, 32, grad=True), waiting=6)


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("places", ["ib", "iib", "iibb", "bi", "bib", "ibi", "sis", "iss"])
def test_weight_in_a_checkpoint_and_behind_it(options: dict[str, Any], places: str) -> None:
    """The whole backward adds what is behind a reentrant one first, before it runs the one inside: W did not.

    Inside of a checkpoint, before or behind one, or scaled (not split) there.
    """

    def body(m: Any, x: Tensor) -> Tensor:
        for place in places:
            if place == "i":
                x = checkpoint(lambda y: torch.tanh(F.linear(torch.tanh(F.linear(y, m.w, m.b)), m.v)), x, **options)
            elif place == "b":
                x = torch.tanh(F.linear(x, m.w, m.b))
            else:
                x = x * m.w.sum() + m.b
        return x

    check(Calls(body, w=draw(32, 32) / 6, v=draw(32, 32, seed=2) / 6, b=draw(32)), draw(4, 32, grad=True))


@pytest.mark.parametrize("inner", [True, False])
def test_weight_in_a_checkpoint_in_a_checkpoint_and_behind_it(inner: bool) -> None:
    def outer(m: Any, x: Tensor) -> Tensor:
        return F.linear(checkpoint(lambda y: torch.tanh(F.linear(y, m.w)), x, use_reentrant=inner), m.w)

    model = Calls(lambda m, x: checkpoint(lambda y: outer(m, y), x, use_reentrant=True), w=draw(32, 32) / 6)
    check(model, draw(4, 32, grad=True))


@pytest.mark.parametrize("options", WAYS)
def test_computed_weight_in_a_checkpoint(options: dict[str, Any]) -> None:
    layer = parametrizations.weight_norm(nn.Linear(32, 32))
    scaled = Calls(
        lambda m, x: F.linear(x, torch.tanh(m.w)) * torch.tanh(m.w).sum() + x * m.b, w=draw(32, 32), b=draw(32)
    )
    check(Checkpointed(nn.ModuleList([layer, nn.Tanh(), scaled, layer]), 2, **options), draw(4, 32, grad=True))


@pytest.mark.parametrize("options", WAYS)
def test_embedding_in_a_checkpoint(options: dict[str, Any]) -> None:
    """A reentrant one needs an input with a gradient."""
    table = nn.Embedding(50, 32)
    model = Calls(lambda m, x, ids: checkpoint(lambda y: torch.tanh(y + m.table(ids)), x, **options))
    model.table = table
    check(model, draw(2, 3, 32, grad=True), torch.tensor([[0, 3, 3], [7, 0, 49]]), waiting=1)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of a checkpoint in no_grad
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_nested(outer: bool, inner: bool) -> None:
    def twice(m: Any, x: Tensor) -> Tensor:
        within = checkpoint(m.one, m.two(x), use_reentrant=inner)
        return m.two(torch.tanh(within))

    model = Calls(lambda m, x: checkpoint(lambda y: twice(m, y), x, use_reentrant=outer) * 2)
    model.one, model.two = Block(), nn.Linear(32, 32)
    check(model, draw(2, 5, 32, grad=True), waiting=6)


def test_selective() -> None:
    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        is_kept = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    options = {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(policy)}
    check(Checkpointed(blocks(2), **options), draw(2, 5, 32, grad=True), waiting=8)


def test_hooks_of_the_user() -> None:
    """What they make of a saved tensor is undone twice, for I and for W."""
    check(nn.Sequential(*blocks(2)), draw(2, 5, 32, grad=True), waiting=8,
          context=lambda: torch.autograd.graph.save_on_cpu(pin_memory=False))  # fmt: skip


def flops(run: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("per_checkpoint", [1, 16])
def test_recomputes_once(options: dict[str, Any], per_checkpoint: int) -> None:
    """torch's halves recompute a checkpoint again for every group of parameters: 11.4 times for one over 16 blocks."""
    model, args = blocks(16), [draw(1, 4, 32, grad=True)]
    plain = nn.Sequential(*copy.deepcopy(model))
    forward = flops(lambda: plain(*args))
    whole = flops(lambda: run_whole(plain, args))

    def both() -> None:
        run_halves(Checkpointed(model, per_checkpoint, **options), args)[2].weight_gradients()

    assert flops(both) <= whole + forward


def test_nothing_is_computed_twice() -> None:
    model, args = nn.Sequential(*blocks(4)), [draw(1, 4, 32, grad=True)]
    assert flops(lambda: run_halves(model, args)[2].weight_gradients()) == flops(lambda: run_whole(model, args))


def test_w_is_left_to_w() -> None:
    """Of a product's three parts, F and I have done two."""
    model, args = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), [draw(8, 64, grad=True)]
    whole = flops(lambda: run_whole(model, args))
    assert flops(lambda: run_halves(model, args)) == whole * 2 // 3
    _, _, halves = run_halves(model, args)
    assert flops(halves.weight_gradients) == whole // 3


def test_stage_that_recomputes() -> None:
    """R: F leaves nothing; the forward of R is in halves, and serves I and W."""
    model = nn.Sequential(*blocks(2)).eval()
    args = leaves_of([draw(2, 5, 32, grad=True)])
    with torch.no_grad():
        expected = model(*args)
    _, outputs, halves = run_halves(model, args)
    assert torch.equal(outputs[0], expected)
    halves.weight_gradients()
    assert all(each.grad is not None for each in model.parameters())
