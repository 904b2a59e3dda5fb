"""Named asserts on whole training runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.testing import sequential_step
from tests.numerics.models import Case

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def assert_bit_equal(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    """Same bits, or both absent."""
    if found is None or expected is None:
        assert found is expected, f"{what}: {found} is not {expected}"
    else:
        assert found.dtype == expected.dtype, what
        assert torch.equal(found, expected), f"{what}: off by {(found - expected).abs().max().item():.3g}"


def assert_same_gradients(pipe: pl.Pipeline, reference: nn.Module) -> None:
    """Every gradient of the pipeline has the bits of the reference's: in all its processes together, if it has many."""
    expected = dict(reference.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert_bit_equal(parameter.grad, expected[name].grad, name)
    assert_whole(pipe, (name for name, _ in pipe.named_parameters()), expected)


def assert_same_state(pipe: pl.Pipeline, reference: nn.Module) -> None:
    """Every parameter and buffer has the bits of the reference's."""
    expected, found = reference.state_dict(), pipe.state_dict()
    for name, tensor in found.items():
        assert_bit_equal(tensor, expected[name], name)
    assert_whole(pipe, found, expected)


def assert_whole(pipe: pl.Pipeline, names: Iterable[str], expected: Iterable[str]) -> None:
    """All processes together have these names; each of them has to call this."""
    parts = [json.loads(part) for part in pipe.group.all_gather(json.dumps(list(names)).encode(), "names")]
    assert sorted(name for part in parts for name in part) == sorted(expected)


def assert_pipeline_equals_oracle(
    case: Case,
    *,
    num_rows: int,
    num_microbatches: int,
    num_steps: int = 1,
    make_optimizer: MakeOptimizer | None = None,
    loss: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Loss and gradients of every step, and the state at the end, equal the sequential oracle's to the bit."""
    model = case.build()
    reference = copy.deepcopy(model)
    loss = {"loss_fn": case.loss_fn} if loss is None else loss
    inputs, target = case.batch(num_rows)
    with pl.Pipeline(model, num_microbatches=num_microbatches, seed=11, **loss, **options) as pipe:
        optimizers = [make_optimizer(each.parameters()) for each in (pipe, reference)] if make_optimizer else []
        for step_index in range(num_steps):
            found = pipe.step(inputs, target=target)
            expected = sequential_step(
                reference,
                inputs,
                target=target,
                num_microbatches=num_microbatches,
                seed=11,
                step_index=step_index,
                **loss,
            )
            assert_bit_equal(found, expected, f"loss of step {step_index}")
            assert_same_gradients(pipe, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(pipe, reference)
