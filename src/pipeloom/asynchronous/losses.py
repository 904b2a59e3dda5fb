"""The losses of a stream: many batches in one program, each with a loss, weights and an update of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.batch.losses import LossRule, StepLoss, Verdict
from pipeloom.batch.microbatches import MicrobatchInputs
from pipeloom.errors import LossError


class StreamLoss(StepLoss):
    """What `StepLoss` is for one batch, for many of them, one after another.

    Args:
        rule: what the user said about the loss.
        batches: the micro-batches of each.
        has_check: whether a loss that is not finite ends the stream.
    """

    def __init__(self, rule: LossRule, batches: Sequence[Sequence[MicrobatchInputs]], *, has_check: bool) -> None:
        super().__init__(rule, [each.num_samples for batch in batches for each in batch], None)
        self._batches = [rule.for_inputs(batch, 1.0) for batch in batches]
        self._place_of = [(number, i) for number, batch in enumerate(batches) for i in range(len(batch))]
        self._has_check = has_check

    @property
    def is_deferred(self) -> bool:
        """Never: an update follows, so gradients have to be scaled at once."""
        return False

    def compute(self, microbatch: int, output: Any, target: Any) -> Tensor:
        """The scalar to back-propagate from for one micro-batch of the stream.

        Raises:
            LossError: it is no loss; is not finite; or counts what other micro-batches of its batch need to know first.
        """
        number, index = self._place_of[microbatch]
        batch = self._batches[number]
        loss = batch.compute(index, output, target)
        if self._has_check and not bool(torch.isfinite(loss.detach())):
            # No `NonFiniteLoss`: that is a verdict which all ranks reach at the end of a step.
            raise LossError(
                f"the loss of batch {number} of the stream is {loss.item()}; it updates nothing, but some stages may "
                "have had more of the updates before it than others",
                "go back to a checkpoint; or pass on_nan='ignore' to go on in any case",
            )
        if batch.is_deferred and len(batch.num_samples) > 1:
            raise LossError(
                "the loss came as (sum, count), but micro-batches of a batch that updates weights on the way cannot "
                "wait for each other's counts",
                "give loss_count=, so that counts are known before the first forward",
            )
        return loss

    def seed(self, microbatch: int) -> float:
        """The gradient of its batch's loss with respect to this micro-batch's."""
        number, index = self._place_of[microbatch]
        batch = self._batches[number]
        return batch.final_scale if batch.is_deferred else batch.seed(index)

    def add_up(self) -> None:
        """Each batch was looked at when its loss came."""

    def verdict(self, step_index: int, *, has_check: bool = True) -> Verdict:
        """The losses of all batches, (num_batches,)."""
        del step_index, has_check
        return Verdict(torch.stack([batch.total() for batch in self._batches]), 1.0, None)
