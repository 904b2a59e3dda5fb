"""Two replicas of the model on ranks that are processes: what the two owners of a stage tell each other.

The first replica has the weights, and an optimizer of its rank updates them. So before a step they go to the rank that
has the stage of the second replica, and its gradients come back: REDUCE_GRAD hands them over, which waits for nobody,
while the rest of the pipeline still drains; they are added when this rank's program is over. Each way carries a stage's
weights once a step, as much as an all-reduce between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import RuntimeStateError
from pipeloom.ir import Placement
from pipeloom.processes.parcels import parcel_of, value_of, weights_of, weights_parcel
from pipeloom.processes.post import Post
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.replicas import Second, unwritten
from pipeloom.runtime.stage import Stage


class Opposite:
    """This rank's part of both replicas.

    Args:
        first: its stages of the first replica, by index.
        second: its stages of the second one, and their weights.
        placement: which rank has which stage of which replica.
        rank: this one.
        post: carries parcels.

    Attributes:
        stages: those of the second replica.
    """

    def __init__(self, first: Mapping[int, Stage], second: Second, placement: Placement, rank: int, post: Post) -> None:
        self._first, self.stages, self._weights = first, second.stages, second.weights
        self._placement, self._rank, self._post = placement, rank, post

    @contextmanager
    def step(self, context: StepContext) -> Iterator[None]:
        """Put this around a rank's program of a training step.

        Raises:
            SplitError: a forward wrote buffers.
            RuntimeStateError: ranks were given inputs that require a gradient, and others the same without.
        """
        self._bring_weights()
        with unwritten([self._first, self.stages]):
            yield
        if len(context.inputs) > 1:  # or all of them ran through the first replica
            self._add_shares()
            self._bring_to_first(context)

    def reduce(self, stage: int) -> None:
        """REDUCE_GRAD: hand over what the second replica has added up; never waits."""
        peer = self._placement.rank_of(stage)
        if stage in self.stages:
            shares = self._weights.shares(stage)
            if peer == self._rank:
                self._weights.add(stage, shares)
            else:
                self._post.give(peer, _shares_key(stage), weights_parcel(shares), is_direct=False)

    @torch.no_grad()
    def _bring_weights(self) -> None:
        for stage in self._first:
            if (peer := self._placement.rank_of(stage, 1)) != self._rank:
                parcel = weights_parcel(each.detach() for each in self._weights.leaves(stage))
                self._post.give(peer, _weights_key(stage), parcel, is_direct=False)
        for stage in self.stages:
            if (peer := self._placement.rank_of(stage)) != self._rank:
                found = weights_of(self._post.get(peer, _weights_key(stage)))
                for copy, weight in zip(self._weights.copies(stage), found, strict=True):
                    assert weight is not None, "every weight of a stage comes"
                    copy.copy_(weight)

    def _add_shares(self) -> None:
        for stage in self._first:
            if (peer := self._placement.rank_of(stage, 1)) != self._rank:
                self._weights.add(stage, weights_of(self._post.get(peer, _shares_key(stage))))

    def _bring_to_first(self, context: StepContext) -> None:
        """What a step leaves besides gradients of weights goes where the first replica has its own."""
        if context.has_outputs:
            self._bring(self._placement.num_stages - 1, b"outputs of the second replica", context.outputs)
        own = dict(context.input_grads)
        self._bring(0, b"gradients of inputs", context.input_grads)
        if self._rank == self._placement.rank_of(0):
            _check_alike(own, context.input_grads)

    def _bring(self, stage: int, key: bytes, values: dict[int, Any]) -> None:
        here, there = self._placement.rank_of(stage), self._placement.rank_of(stage, 1)
        if here != there and self._rank == there:
            self._post.give(here, key, parcel_of(dict(values)), is_direct=False)
            values.clear()
        elif here != there and self._rank == here:
            values.update(value_of(self._post.get(there, key)))


def _weights_key(stage: int) -> bytes:
    return f"weights of stage {stage}".encode()


def _shares_key(stage: int) -> bytes:
    return f"shares of stage {stage}".encode()


def _check_alike(own: Mapping[int, tuple[Tensor | None, ...]], all_of_them: Mapping[int, Any]) -> None:
    forms = {tuple(grad is not None for grad in each) for each in own.values()}
    others = {tuple(grad is not None for grad in each) for i, each in all_of_them.items() if i not in own}
    if len(forms) == len(others) == 1 and forms != others:
        raise RuntimeStateError(
            "an input requires a gradient on one rank and not on another; the schedule runs two replicas of the model, "
            "which begin on different ranks and both find some",
            "call requires_grad_() in every process",
        )
