"""What is alive after I: the inputs of what is split and the gradients of its outputs, and nothing after W."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom.halves import Halves
from tests.halves.both import Calls, draw
from tests.halves.test_checkpoints import Block, Checkpointed


class Watched:
    """Notes the tensors that go into and come out of products, weakly."""

    def __init__(self, model: nn.Module) -> None:
        self.num_bytes = 0
        for each in model.modules():
            if isinstance(each, nn.Linear):
                each.register_forward_hook(self.note)

    def note(self, _: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.num_bytes += args[0].nbytes + output.nbytes


class Ledger(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes of memory that operators make and that are still there, whoever holds them."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        # A view is the first that is seen of their memory.
        self.known = {each.untyped_storage()._cdata for each in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if not isinstance(each, Tensor):
                continue
            key = each.untyped_storage()._cdata
            if key not in self.live and key not in self.known:
                self.live[key] = each.untyped_storage().nbytes()
                weakref.finalize(each.untyped_storage(), self.live.pop, key, None)
        return out

    @property
    def num_bytes(self) -> int:
        gc.collect()
        return sum(self.live.values())


def live_after(model: nn.Module, value: Tensor, grad: Tensor) -> tuple[int, int, int]:
    """Bytes after the forward, after I and after W, without gradients of parameters."""
    halves, ledger = Halves(), Ledger(value, *model.parameters())
    with ledger:
        with halves.forward():
            output = model(value)
        forward = ledger.num_bytes
        with halves.input_gradients():
            torch.autograd.backward(output, grad)
        del output
        value.grad = None
        small = [each.grad for each in model.parameters() if each.grad is not None]
        after_i = ledger.num_bytes - sum(each.nbytes for each in small)
        del small
        halves.weight_gradients()
        for each in model.parameters():
            each.grad = None
        return forward, after_i, ledger.num_bytes


def test_bytes_after_i() -> None:
    """Attention, norms and activation functions keep nothing."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    watched = Watched(model)
    model(draw(2, 64, 32))
    bound, watched.num_bytes = watched.num_bytes, 0
    forward, after_i, after_w = live_after(model, draw(2, 64, 32, grad=True), draw(2, 64, 32))
    assert 0 < after_i <= bound
    assert after_i < forward * 1.05
    assert after_w == 0


def test_bytes_after_i_with_checkpoints() -> None:
    """The recomputed activations live as long as W needs them, and no longer."""
    for is_reentrant in (False, True):
        blocks = nn.ModuleList([Block() for _ in range(3)])
        watched = Watched(blocks)
        model = Checkpointed(blocks, use_reentrant=is_reentrant)
        model(draw(2, 64, 32, grad=True))
        bound = watched.num_bytes
        forward, after_i, after_w = live_after(model, draw(2, 64, 32, grad=True), draw(2, 64, 32))
        assert 0 < after_i <= bound
        assert forward < bound / 2
        assert after_w == 0


def test_graph_of_the_forward_is_freed_by_i() -> None:
    saved: list[Any] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept = x * 2
            saved.append(weakref.ref(kept))
            ctx.kept = kept
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    model, halves = Calls(lambda m, x: F.linear(Keeps.apply(F.linear(x, m.w)), m.w), w=draw(32, 32)), Halves()
    with halves.forward():
        output = model(draw(4, 32, grad=True))
    assert saved[0]() is not None
    with halves.input_gradients():
        output.sum().backward()
    del output
    gc.collect()
    assert saved[0]() is None
    assert halves.num_waiting == 2
