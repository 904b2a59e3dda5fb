"""All ranks of a pipeline in this process."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from functools import partial

import torch

from pipeloom.batch.losses import StepLoss
from pipeloom.ir import Kind, Placement, Timeline
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.control import Control
from pipeloom.runtime.executor import Plan, execute
from pipeloom.runtime.gradients import GradientChanges, GradientScope
from pipeloom.runtime.handlers import RankHandlers
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.threads import RankThreads
from pipeloom.runtime.trace import Trace
from pipeloom.runtime.transport import LocalTransport


class LocalRuntime:
    """Runs schedules on threads: a notebook needs nothing else.

    Args:
        stages: in model order.
        placement: which rank runs which stage.

    Attributes:
        peak_live_slots: per rank, the most receives that were live at once in the last run.
    """

    def __init__(self, stages: Sequence[Stage], placement: Placement) -> None:
        self._stages = tuple(stages)
        self._placement = placement
        self._threads = RankThreads(placement.num_ranks)
        self.peak_live_slots: tuple[int, ...] = ()
        self.wait_for_late_ranks = self._threads.wait_for_late_ranks
        self.close = weakref.finalize(self, self._threads.close)  # called at the latest when nobody has this any more

    def run(self, plan: Plan, context: StepContext, *, has_trace: bool) -> tuple[Timeline | None, GradientChanges]:
        """Run one step or evaluation on all ranks.

        Returns:
            What was measured if it was asked for, and the gradients' changes, which can still be undone.

        Raises:
            BaseException: what the first failing rank raised; gradients are then as they were before.
        """
        self.wait_for_late_ranks()  # before this step remembers gradients that they may still add to
        changes = GradientChanges() if context.loss is None else self._changes(context.loss)
        transport = LocalTransport(plan.schedule, plan.channels)
        control = Control(plan.schedule.num_ranks)
        trace = Trace(plan.schedule) if has_trace else None

        def stop() -> None:
            control.stop()
            transport.abort()

        def undo_late(ranks: Collection[int]) -> None:
            last = [control.last_seen[rank] for rank in ranks]
            changes.undo_late({action.stage for action in last if action and action.kind is Kind.BACKWARD})

        def work(rank: int) -> None:
            stages = {index: self._stages[index] for index in self._placement.stages_of(rank)}
            handlers = RankHandlers(stages, len(self._stages), changes.scopes, transport, context)
            with context.ambient.entered(), torch.set_grad_enabled(context.loss is not None):
                execute(plan, rank, handlers.table, transport, control, trace)

        tasks = [partial(work, rank) for rank in range(plan.schedule.num_ranks)]
        self._threads.run(tasks, stop=stop, undo=changes.undo, undo_late=undo_late)
        self.peak_live_slots = tuple(transport.peak_live_slots)
        return (trace.timeline() if trace else None), changes

    def _changes(self, loss: StepLoss) -> GradientChanges:
        parameters = {stage.index: list(stage.module.parameters()) for stage in self._stages}
        known = {each for found in parameters.values() for each in found}
        # The last stage computes the loss.
        parameters[len(self._stages) - 1] += [each for each in loss.rule.parameters if each not in known]
        return GradientChanges({index: GradientScope(found) for index, found in parameters.items()})
