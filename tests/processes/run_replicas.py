"""What ranks do in the tests of schedules that run two replicas; a failed assertion ends the rank with code 1."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.checkpoint import load_checkpoint, save_checkpoint
from pipeloom.errors import PeerFailed, RuntimeStateError, SplitError
from pipeloom.halves import functions
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients, assert_same_state
from tests.processes.run_models import t5
from tests.runtime.test_every_schedule import OPPOSED, WIDTH, Gpt, square, token_loss, tokens

Batch = tuple[Tensor, Tensor]


class Fails(nn.Module):
    """A layer that may be told to fail."""

    failing: nn.Module | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → (B, WIDTH)."""
        if Fails.failing is self:
            raise ZeroDivisionError("told to")
        return torch.tanh(self.linear(x))


class Head(nn.Module):
    """A loss with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Twice (B, WIDTH) → a scalar."""
        return square(self.linear(output), target)


def chain() -> nn.Sequential:
    """Four stages of one layer."""
    torch.manual_seed(0)
    return nn.Sequential(*(Fails() for _ in range(4)))


def rows() -> Batch:
    """Eleven samples, so micro-batches of two sizes."""
    return torch.randn(2, 11, WIDTH).unbind()  # type: ignore[return-value]


def trains(num_ranks: int) -> None:
    """Steps with the bits of the oracle; copies follow the optimizer; then the model is whole again."""
    functions.MIN_MULTIPLICATIONS = 0  # or a small model has nothing to split
    for name in OPPOSED:
        torch.manual_seed(0)
        made = Gpt()
        reference, (x, _) = copy.deepcopy(made), tokens()
        options: dict[str, Any] = {"num_stages": num_ranks, "num_microbatches": 5, "loss_fn": token_loss}
        with pl.Pipeline(made, schedule=name, **options, example_args=(x[:2],)) as pipe:
            optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (pipe, reference)]
            for step_index in range(3):
                x, target = tokens()
                loss = pipe.step(x, target=target)
                step: dict[str, Any] = {"target": target, "schedule": pipe.schedule, "step_index": step_index}
                assert_bit_equal(loss, sequential_step(reference, x, **step, **options), name)
                assert_same_gradients(pipe, reference)
                assert torch.allclose(
                    pipe.clip_grad_norm_(1e9), nn.utils.clip_grad_norm_(reference.parameters(), 1e9), rtol=1e-6
                )
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert_same_state(pipe, reference)
            full = pipe.full_state_dict()
            assert list(full) == (list(reference.state_dict()) if pipe.group.rank == 0 else [])
            evaluated = pipe.eval()(x, broadcast_output=True)
            assert_bit_equal(evaluated, torch.cat([reference.eval()(each) for each in x.tensor_split(5)]), "output")
            assert pipe.unwrap() is made
        for (key, tensor), other in zip(made.state_dict().items(), reference.state_dict().values(), strict=True):
            assert_bit_equal(tensor, other, key)
        assert made.head.weight is made.tokens.weight


class Scaled(nn.Module):
    """A model cut by running it, with a weight that the code between its layers uses in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.ModuleList(Fails() for _ in range(8)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → (B, WIDTH)."""
        for layer in self.layers:
            x = x + layer(x) * self.scale
        return x


def shares_a_weight_among_all_stages(num_ranks: int) -> None:
    """The second replica's stages lost their copies of it, whose owner another rank has."""
    for options in ({"recompute": True}, {"receive_slots": 6}):
        torch.manual_seed(0)
        made = Scaled()
        reference, (x, target) = copy.deepcopy(made), rows()
        same: dict[str, Any] = {"num_stages": num_ranks, "num_microbatches": 5, "loss_fn": square}
        with pl.Pipeline(
            made, schedule="dualpipe", overlap=_backward_first, example_args=(x[:2],), **same, **options
        ) as pipe:
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, reference)]
            for step_index in range(2):
                loss = pipe.step(x, target=target)
                step: dict[str, Any] = {"target": target, "schedule": pipe.schedule, "step_index": step_index}
                assert_bit_equal(loss, sequential_step(reference, x, **step, **same), "loss")
                assert_same_gradients(pipe, reference)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert_same_state(pipe, reference)
            pipe.unwrap()
        for (key, tensor), other in zip(made.state_dict().items(), reference.state_dict().values(), strict=True):
            assert_bit_equal(tensor, other, key)


def _backward_first(forward: Callable[[], None], backward: Callable[[], None]) -> None:
    backward()
    forward()


def leaves_what_one_replica_leaves(num_ranks: int) -> None:
    """Outputs on the rank of the loss, gradients of inputs on the first, and one verdict on all."""
    made, (x, target) = chain(), rows()
    options: dict[str, Any] = {"num_stages": num_ranks, "num_microbatches": 5, "on_nan": "skip"}
    for loss_fn in (square, lambda output, target: ((output - target).square().sum(), float(target.numel())), Head()):
        reference, other_loss = copy.deepcopy((made, loss_fn))
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        with (
            pl.Pipeline(copy.deepcopy(made), schedule="dualpipe", loss_fn=loss_fn, **options) as pipe,
            pl.Pipeline(
                copy.deepcopy(made), schedule="1f1b", loss_fn=copy.deepcopy(loss_fn), transport="local", **options
            ) as single,
        ):
            rank = pipe.group.rank
            loss, outputs = pipe.step(inputs[0], target=target, return_outputs=True)
            expected, all_outputs = single.step(inputs[1], target=target, return_outputs=True)
            assert_bit_equal(loss, expected, "loss")
            assert_bit_equal(outputs, all_outputs if rank == num_ranks - 1 else None, "outputs")
            assert_bit_equal(inputs[0].grad, inputs[1].grad if rank == 0 else None, "the gradient of the input")
            step: dict[str, Any] = {"target": target, "schedule": pipe.schedule, "loss_fn": other_loss}
            sequential_step(reference, x, num_stages=num_ranks, num_microbatches=5, **step)
            assert_same_gradients(pipe, reference)
            if isinstance(loss_fn, Head) and rank == num_ranks - 1:
                assert_bit_equal(loss_fn.linear.weight.grad, other_loss.linear.weight.grad, "the loss's own weight")
            before = {name: each.grad.clone() for name, each in pipe.named_parameters() if each.grad is not None}
            assert before
            assert torch.isnan(pipe.step(x, target=torch.full_like(target, float("nan"))))
            for name, parameter in pipe.named_parameters():
                assert_bit_equal(parameter.grad, before[name], name)


def fails_in_one_replica(num_ranks: int) -> None:
    """All ranks say the same, and gradients are as before; inputs and buffers that can't be right are refused."""
    made, (x, target) = chain(), rows()
    options: dict[str, Any] = {"num_stages": num_ranks, "num_microbatches": 4, "loss_fn": square}
    with pl.Pipeline(made, schedule="chimera", **options) as pipe:
        pipe.step(x, target=target)
        before = {name: each.grad.clone() for name, each in pipe.named_parameters()}
        second = pipe._assembled.ranks.runtime._opposite.stages  # type: ignore[union-attr]
        Fails.failing = second[0].units[0].module if 0 in second else None  # on the last rank
        with pytest.raises(ZeroDivisionError if Fails.failing else PeerFailed, match="told to"):
            pipe.step(x, target=target)
        for name, parameter in pipe.named_parameters():
            assert_bit_equal(parameter.grad, before[name], name)
        Fails.failing = None
        pipe.step(x, target=target)
        is_last = pipe.group.rank == num_ranks - 1
        with pytest.raises((RuntimeStateError, PeerFailed), match="an input requires a gradient on one rank and not"):
            pipe.step(x.clone().requires_grad_(is_last), target=target)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(num_ranks)]
    with (
        pl.Pipeline(nn.Sequential(*layers), schedule="chimera", **options) as pipe,
        pytest.raises((SplitError, PeerFailed), match="keeps running statistics"),
    ):
        pipe.step(x, target=target)


def saves(num_ranks: int, folder: str) -> None:
    """A checkpoint holds each weight once, and is what a pipeline with one replica goes on from."""
    made, reference, (x, target) = chain(), chain(), rows()
    options: dict[str, Any] = {"num_stages": num_ranks, "num_microbatches": 4, "loss_fn": square}
    with pl.Pipeline(made, schedule="dualpipe", **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
        pipe.step(x, target=target)
        optimizer.step()
        save_checkpoint(folder, pipe, optimizer)
        expected = pipe.full_state_dict(to=0)
    with pl.Pipeline(reference, schedule="1f1b", **options) as pipe:
        load_checkpoint(folder, pipe, pipe.optimizer(torch.optim.AdamW, lr=1e-2))
        found = pipe.full_state_dict(to=0)
        assert list(found) == list(expected)
        for name, tensor in found.items():
            assert_bit_equal(tensor, expected[name], name)


def reads_its_weights(num_ranks: int, path: str) -> None:
    """A factory and a file: a rank has its stage of either replica, and nothing else of the model."""
    torch.manual_seed(0)
    reference = Gpt()
    if int(os.environ["RANK"]) == 0:
        state = {name: each.clone() for name, each in reference.state_dict().items() if name != "head.weight"}
        save_file(state, f"{path}.part")
        Path(f"{path}.part").rename(path)
    while not Path(path).exists():
        time.sleep(0.01)
    x, target = tokens()
    options: dict[str, Any] = {"num_stages": num_ranks, "num_microbatches": 6, "loss_fn": token_loss}
    with pl.Pipeline(factory=Gpt, weights=path, schedule="dualpipe", **options, example_args=(x[:2],)) as pipe:
        second, rank = pipe._assembled.replica, pipe.group.rank
        assert second is not None
        opposite = num_ranks - 1 - rank
        assert [bool(second.copies(stage)) for stage in range(num_ranks)] == [s == opposite for s in range(num_ranks)]
        here = [each for each in pipe._root.parameters() if not each.is_meta]
        assert len(here) <= len(list(pipe.parameters())) + 2 * (rank in (0, num_ranks - 1))  # who share the embedding
        assert all(each.is_meta for unit in second.split.stages[rank] for each in unit.module.parameters())
        for step_index in range(2):
            loss = pipe.step(x, target=target)
            step: dict[str, Any] = {"target": target, "schedule": pipe.schedule, "step_index": step_index}
            assert_bit_equal(loss, sequential_step(reference, x, **step, **options), "loss")
            assert_same_gradients(pipe, reference)


def trains_a_library_model(num_ranks: int) -> None:
    """An encoder and a decoder whose embedding is used in three stages of either replica."""
    made, inputs = t5()
    reference = copy.deepcopy(made)
    options: dict[str, Any] = {"num_stages": num_ranks, "num_microbatches": 4}
    with pl.Pipeline(made, schedule="dualpipe", **options) as pipe:
        found = pipe.step(**inputs)
        assert_bit_equal(found, sequential_step(reference, schedule=pipe.schedule, **options, **inputs), "loss")
        assert_same_gradients(pipe, reference)
