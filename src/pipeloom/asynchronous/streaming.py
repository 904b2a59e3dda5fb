"""How a pipeline runs a stream of batches: what `Pipeline` has of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.assembly import Assembly, Recipe, links_of
from pipeloom.asynchronous.losses import StreamLoss
from pipeloom.asynchronous.stream import Given, MakeOptimizer, MakeScheduler, Stream, Updates
from pipeloom.asynchronous.versions import StageWeights, Versions, check_memory, check_weight
from pipeloom.batch.caches import without_cache
from pipeloom.batch.losses import LossRule, StepLoss
from pipeloom.batch.microbatches import MicrobatchInputs, split_batch
from pipeloom.batch.trees import flatten
from pipeloom.errors import BatchError, LossError, RuntimeStateError
from pipeloom.ir import Kind, Schedule
from pipeloom.ir.versions import used_versions
from pipeloom.programs import Programs
from pipeloom.runtime.context import Around, StepContext
from pipeloom.runtime.executor import Handler, Plan
from pipeloom.runtime.gradients import GradientChanges


class Streaming(ABC):
    """A pipeline's part in training without a flush."""

    _programs: Programs
    _recipe: Recipe
    _rule: LossRule
    _model: nn.Module | Sequence[nn.Module]
    _on_nan: str
    step_index: int

    def stream(self, optimizer: MakeOptimizer, *, scheduler: MakeScheduler | None = None) -> Stream:
        """For a schedule that updates weights by itself (``pipedream``, ``pipedream-2bw``): what trains with it.

        ``pipe.stream(lambda weights: torch.optim.SGD(weights, lr=0.1)).train(batches)``; docs/asynchronous.md.

        Args:
            optimizer: called with the list of a stage's trainable weights, once for each stage that has any.
            scheduler: called with each of these optimizers; makes a learning-rate scheduler, whose ``step()`` follows
                every update.

        Raises:
            RuntimeStateError: the schedule leaves updates to the caller; or the pipeline was asked for what cannot be
                done while weights change: ``batch_norm="deferred"`` and ``on_nan="skip"``.
        """
        if not self._programs.updates_weights:
            raise RuntimeStateError(
                f"stream() was called, but schedule {self._programs.name!r} leaves updates to you",
                "call step() and your optimizer's step(), or make the pipeline with schedule='pipedream'",
            )
        self._check_streamable()
        return Stream(self._run_stream, self._trainable, optimizer, scheduler)

    @abstractmethod
    def _running(self) -> AbstractContextManager[None]:
        """Around all that runs."""

    @abstractmethod
    def _context(
        self, inputs: list[MicrobatchInputs], loss: StepLoss | None, batch: Any, *, has_outputs: bool
    ) -> StepContext:
        """What the ranks share; cuts the model by the inputs if it is not cut yet."""

    @abstractmethod
    def _run(self, plan: Plan, context: StepContext) -> GradientChanges:
        """Run a plan."""

    @property
    @abstractmethod
    def _assembled(self) -> Assembly:
        """The cut model."""

    @property
    @abstractmethod
    def num_microbatches(self) -> int:
        """Parts that each batch is cut into."""

    def _check_steps(self) -> None:
        """Raise if weights are updated by the schedule, and so not by the caller after a step."""
        if self._programs.updates_weights:
            raise RuntimeStateError(
                f"step() was called, but schedule {self._programs.name!r} updates weights by itself, between the "
                "micro-batches of many batches",
                "train with pipe.stream(lambda weights: torch.optim.SGD(weights, lr=0.1)).train(batches), or take a "
                "synchronous schedule such as '1f1b'",
            )

    def _run_stream(self, batches: Sequence[Given], updates_of: Callable[[], Updates]) -> Tensor:
        """Run batches one after another; the losses of all."""
        if not torch.is_grad_enabled():
            raise RuntimeStateError("train() was called with gradients switched off", "leave torch.no_grad()")
        with self._running():
            sizes = self._programs.batch_sizes(len(batches), self.num_microbatches)
            cut = [
                split_batch(args, without_cache(self._model, args, kwargs), target, size)
                for (args, kwargs, target), size in zip(batches, sizes, strict=True)
            ]
            inputs = [each for batch in cut for each in batch]
            _check_inputs(inputs)
            loss = StreamLoss(self._rule, cut, has_check=self._on_nan == "raise")
            context = self._context(inputs, loss, list(batches), has_outputs=False)
            self._check_ties()
            plan = self._programs.stream(sizes, links_of(context.plans))
            around, end = self._around(plan.schedule, updates_of)
            context = replace(context, around=around, ambient=context.ambient.without_cast_cache())
            try:
                with self._run(plan, context):
                    verdict = self._assembled.ranks.runtime.agree(partial(loss.verdict, self.step_index))
            except BaseException:
                end()  # ranks that are late would leave a version of their own in the model
                raise
        self.step_index += 1
        assert verdict is not None, "a stream has losses"
        return verdict.value

    def _stage_modules(self) -> dict[int, list[nn.Module]]:
        """By stage, what is here."""
        built = self._assembled
        return {stage: [unit.module for unit in built.split.stages[stage]] for stage in sorted(built.ranks.stages)}

    def _trainable(self) -> dict[int, list[nn.Parameter]]:
        return {
            stage: [each for each in nn.ModuleList(modules).parameters() if each.requires_grad]
            for stage, modules in self._stage_modules().items()
        }

    def _around(self, schedule: Schedule, updates_of: Callable[[], Updates]) -> tuple[Around, Callable[[], None]]:
        """What the handlers become, and what ends a call that failed.

        What is wrong on this rank alone is raised by the handlers: that tells the others.
        """
        try:
            self._check_weights()
            versions = self._versions(schedule, updates_of())
        except Exception as error:
            return partial(_raise, error), _nothing
        return versions.around, versions.end

    def _versions(self, schedule: Schedule, updates: Updates) -> Versions:
        used, microbatches = used_versions(schedule), range(schedule.num_microbatches)
        return Versions(
            {
                stage: StageWeights(modules, [used[stage, i] for i in microbatches], updates.get(stage, _nothing))
                for stage, modules in self._stage_modules().items()
            }
        )

    def _check_streamable(self) -> None:
        """What was asked of the pipeline and has no meaning where weights change on the way."""
        refused = {
            "batch_norm='deferred'": self._recipe.is_deferred,
            "on_nan='skip'": self._on_nan == "skip",
        }
        for what, is_asked in refused.items():
            if is_asked:
                raise RuntimeStateError(
                    f"{what} was given with schedule {self._programs.name!r}, which updates weights before a batch has "
                    "left the pipeline: it is too late then",
                    "leave it out, or take a synchronous schedule such as '1f1b'",
                )

    def _check_ties(self) -> None:
        """No stage can update what another one has too."""
        split, ties = self._assembled.split, self._assembled.ties
        tied = ties.weights_of(range(split.num_stages))
        if tied:
            names = [name for name, each in split.root.named_parameters(remove_duplicate=False) if id(each) in tied]
            raise RuntimeStateError(
                f"stages share weights ({', '.join(names) or 'other processes have them'}), but each stage updates its "
                "own at its own time, so that their copies would differ",
                "untie them, cut the model so that one stage has them, or take a synchronous schedule such as '1f1b'",
            )

    def _check_weights(self) -> None:
        """Which weights cannot have versions."""
        split, trainable = self._assembled.split, self._trainable()
        last = split.num_stages - 1
        own = {id(each) for module in self._stage_modules().get(last, ()) for each in module.parameters()}
        if last in trainable and any(id(each) not in own for each in self._rule.parameters):
            raise LossError(
                "the loss function holds weights that are not of the last stage; they have no versions, and no stage's "
                "optimizer updates them",
                "make the loss a part of the model's last module",
            )
        names = {id(each): name for name, each in split.root.named_parameters()}
        for weight in (each for weights in trainable.values() for each in weights):
            check_weight(names[id(weight)], weight)
        here = nn.ModuleDict({str(stage): nn.ModuleList(each) for stage, each in self._stage_modules().items()})
        check_memory(dict([*here.named_parameters(), *here.named_buffers()]))


def _nothing() -> None:
    """A stage without trainable weights has no update."""


def _raise(error: Exception, _: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
    raise error


def _check_inputs(inputs: Sequence[MicrobatchInputs]) -> None:
    for each in inputs:
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flatten((each.args, each.kwargs))[0]):
            raise BatchError(
                "an input of the stream requires a gradient; the weights that it depends on are updated on the way, so "
                "there is no one gradient of a batch",
                "pass input.detach()",
            )
