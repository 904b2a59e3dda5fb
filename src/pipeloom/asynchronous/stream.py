"""A stream of batches through a pipeline that never drains: what the user holds of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import BatchError, RuntimeStateError

Given = tuple[tuple[Any, ...], dict[str, Any], Any]
"""The positional and keyword arguments of the model, and the target, of one batch."""
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
Updates = Mapping[int, Callable[[], None]]


class Stream:
    """The optimizers of a pipeline whose schedule updates weights by itself, one for each stage.

    Made by `Pipeline.stream`. Optimizers and learning-rate schedulers stay from one `train` to the next.

    Args:
        run: runs batches, with what updates each stage.
        weights_of: the trainable weights of each stage in this process.
        make_optimizer: makes a stage's optimizer from its weights.
        make_scheduler: makes what changes its learning rate.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Given], Callable[[], Updates]], Tensor],
        weights_of: Callable[[], Mapping[int, list[nn.Parameter]]],
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
    ) -> None:
        wanted: list[tuple[str, Any]] = [("optimizer", make_optimizer)]
        wanted += [] if make_scheduler is None else [("scheduler", make_scheduler)]
        for name, made_by in wanted:
            if not callable(made_by):
                raise RuntimeStateError(
                    f"{name}={made_by!r} was given; a function that makes one for each stage is needed",
                    "as lambda weights: torch.optim.SGD(weights, lr=0.1)",
                )
        self._run, self._weights_of = run, weights_of
        self._make_optimizer, self._make_scheduler = make_optimizer, make_scheduler
        self._made: dict[int, tuple[torch.optim.Optimizer, Any]] | None = None
        self._known: list[nn.Parameter] = []

    @property
    def optimizers(self) -> dict[int, torch.optim.Optimizer]:
        """By stage, the optimizer of its weights; of the stages in this process that have any.

        Raises:
            RuntimeStateError: the model is cut by its first inputs, and there were none yet; or it has other weights by
                now than when they were made.
        """
        return {stage: optimizer for stage, (optimizer, _) in self._all().items()}

    @property
    def schedulers(self) -> dict[int, Any]:
        """By stage, its learning-rate scheduler; none without ``scheduler=``."""
        return {stage: scheduler for stage, (_, scheduler) in self._all().items() if scheduler is not None}

    def train(self, batches: Iterable[Any]) -> Tensor:
        """Train on batches, one after another, without a pause between them; the pipeline drains at the end.

        All batches of a call are held in memory meanwhile, and its first ones use the weights that are there when it
        begins: the more batches, the less time is spent on filling and draining the pipeline.

        Args:
            batches: pairs ``(inputs, target)``: inputs are the model's only argument, a tuple of its positional
                arguments or a dict of its keyword arguments; the target is None if the output has the loss.

        Returns:
            The loss of each batch, with the weights that it used; detached, ``(num_batches,)``, on every rank.

        Raises:
            BatchError: there is no batch, or one is no pair or cannot be cut into micro-batches.
            LossError: a loss cannot be used, or is not finite.
            RuntimeStateError: the pipeline is closed or in use, or the model is one that cannot be trained so.
            Exception: what a stage raised, with a note that says where. Stages may then be some updates apart.
        """
        given = [_given(each) for each in batches]
        if not given:
            raise BatchError("no batch was given; at least one is needed")
        return self._run(given, lambda: {stage: _update(*made) for stage, made in self._all().items()})

    def _all(self) -> dict[int, tuple[torch.optim.Optimizer, Any]]:
        weights_of = self._weights_of()
        if self._made is None:
            self._known = [each for weights in weights_of.values() for each in weights]
            self._made = {stage: self._of(weights) for stage, weights in weights_of.items() if weights}
        known = {id(each) for each in self._known}
        if any(id(each) not in known for weights in weights_of.values() for each in weights):
            raise RuntimeStateError(
                "the model has trainable weights that it did not have when the optimizers of this stream were made: "
                "some were replaced, or are no longer frozen; no optimizer would update them",
                "call pipe.stream() again, and load the state of the old optimizers into the new ones if it matters",
            )
        return self._made

    def _of(self, weights: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = self._make_optimizer(weights)
        if not all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad")):
            raise RuntimeStateError(
                f"optimizer= returned {optimizer!r} for a stage; an optimizer of the weights given to it is needed",
                "as lambda weights: torch.optim.SGD(weights, lr=0.1)",
            )
        return optimizer, None if self._make_scheduler is None else self._make_scheduler(optimizer)


def _update(optimizer: torch.optim.Optimizer, scheduler: Any) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()

    return update


def _given(batch: Any) -> Given:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise BatchError(
            f"a batch of the stream is a {type(batch).__name__}; a pair (inputs, target) is needed",
            "as in train([(inputs, target)]); inputs may be a tuple or a dict of the model's arguments",
        )
    inputs, target = batch
    if isinstance(inputs, dict):
        return (), inputs, target
    return inputs if isinstance(inputs, tuple) else (inputs,), {}, target
