"""The oracles of schedules that update weights on the way: their update rules, as plain loops (contract 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeloom.batch.losses import LossFn, LossRule, Reduction
from pipeloom.batch.microbatches import split_batch
from pipeloom.batch.model_losses import ModelLoss
from pipeloom.runtime.ambient import Ambient
from pipeloom.runtime.draws import drawing_in_backward
from pipeloom.splitting import split
from pipeloom.testing.oracle import Oracle

Rule = Literal["weight-stashing", "vertical-sync", "2bw"]


def stale_version(rule: Rule, num_stages: int, num_microbatches: int, stage: int, microbatch: int) -> int:
    """How many updates the weights have had that a micro-batch uses on a stage.

    With one micro-batch per batch, batch t, n stages and stages counted from 0 this is max(0, t−n+1+stage) for weight
    stashing and max(0, t−n+1) for vertical sync (PipeDream, section 3.3); with 2BW max(0, t−1) (PipeDream-2BW, 3.1).
    """
    if rule == "2bw":
        return max(0, microbatch // num_microbatches - 1)
    first = stage if rule == "weight-stashing" else 0
    return max(0, microbatch - (num_stages - 1 - first)) // num_microbatches


def asynchronous_steps(  # long: what each argument means, once each
    model: nn.Module | Sequence[nn.Module],
    batches: Iterable[tuple[Tensor, Any]],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    rule: Rule | Callable[[int, int], int],
    num_stages: int,
    num_microbatches: int = 1,
    loss_fn: LossFn | None = None,
    loss_reduction: Reduction = "mean",
    loss_count: Callable[[Any], Any] | None = None,
    cuts: Sequence[int] | None = None,
    seed: int = 0,
    step_index: int = 0,
) -> Tensor:
    """Train a whole model as the rule says: one micro-batch at a time, with every version of the weights kept.

    For each micro-batch the weights of each stage become those of the version that the rule names, the whole model
    runs forward and backward, and after a batch each stage's optimizer updates its newest weights.

    Args:
        model: what the pipeline was made from; it is trained.
        batches: pairs (input, target).
        optimizer: makes each stage's from its trainable weights.
        rule: of which version a stage uses: by name, or a function of stage and micro-batch.
        num_stages: as the pipeline's.
        num_microbatches: into how many each batch is cut.
        loss_fn: as the pipeline's.
        loss_reduction: as the pipeline's.
        loss_count: as the pipeline's.
        cuts: as the pipeline's.
        seed: as the pipeline's.
        step_index: the pipeline's before its `train`.

    Returns:
        The loss of each batch, ``(num_batches,)``, detached.
    """
    given = [split_batch((x,), {}, target, num_microbatches) for x, target in batches]
    made = split(model, num_stages=num_stages, cuts=cuts, inputs=(given[0][0].args, given[0][0].kwargs))
    loss_rule = LossRule(loss_fn, loss_reduction, loss_count, ModelLoss.of(model))
    stages = [_Stage(nn.ModuleList([unit.module for unit in units]), optimizer) for units in made.stages]
    version_of = rule if callable(rule) else partial(stale_version, rule, num_stages, num_microbatches)
    ambient = Ambient.capture().without_cast_cache()

    def run() -> Tensor:
        losses = []
        with ambient.entered():
            for number, inputs in enumerate(given):
                loss, first = loss_rule.for_inputs(inputs, 1.0), number * num_microbatches
                oracle = Oracle(made, inputs, loss, ambient, seed, step_index, first)
                for i in range(len(inputs)):
                    for stage, each in enumerate(stages):
                        each.become(version_of(stage, first + i))
                    _run(oracle, i)
                for each in stages:
                    each.update()
                losses.append(loss.total())
        return torch.stack(losses)

    with ThreadPoolExecutor(1) as executor:  # as a rank is: the caller's autocast must not be around the backward
        return executor.submit(run).result()


def _run(oracle: Oracle, microbatch: int) -> None:
    """Forward and backward of one micro-batch of a batch."""
    scalar, loss = oracle.forward(microbatch), oracle.loss
    share = loss.final_scale if loss.is_deferred else loss.seed(microbatch)
    with drawing_in_backward(oracle.key(microbatch, "backward")):
        torch.autograd.backward(scalar, torch.full_like(scalar, share))


class _Stage:
    """The trainable weights of a stage, its optimizer, and a copy of every version that there ever was."""

    def __init__(self, module: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.weights = [each for each in module.parameters() if each.requires_grad]
        self.optimizer = make(self.weights) if self.weights else None
        self.versions = [self.copies()]

    def copies(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def become(self, version: int) -> None:
        for weight, value in zip(self.weights, self.versions[version], strict=True):
            weight.copy_(value)

    def update(self) -> None:
        """The next version, from the newest one and the gradients that are there."""
        self.become(-1)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.versions.append(self.copies())
