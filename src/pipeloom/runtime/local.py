"""All ranks of a pipeline in this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeloom.batch.losses import Verdict
from pipeloom.ir import Action, Kind, Placement, Schedule
from pipeloom.ir.action import BACKWARD_KINDS
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.control import Control
from pipeloom.runtime.executor import Plan, execute
from pipeloom.runtime.gradients import GradientChanges
from pipeloom.runtime.replicas import Reductions, Second, scopes_of, table_of, unwritten
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.threads import RankThreads
from pipeloom.runtime.trace import Trace
from pipeloom.runtime.transport import LocalTransport


class LocalRuntime:
    """Runs schedules on threads: a notebook needs nothing else.

    Args:
        stages: in model order.
        placement: which rank runs which stage.
        second: the second replica, where the placement has two.

    Attributes:
        rank: of this process among the pipeline's processes.
        num_ranks: how many processes there are.
        trace: of the last run; None if it was not traced.
        peak_live_slots: per rank, the most receives that were live at once in the last run.
    """

    rank, num_ranks = 0, 1

    def __init__(self, stages: Sequence[Stage], placement: Placement, second: Second | None = None) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._second = second
        self._placement = placement
        self._threads = RankThreads(placement.num_ranks)
        self.trace: Trace | None = None
        self.peak_live_slots: tuple[int, ...] = ()
        self.wait_for_late_ranks = self._threads.wait_for_late_ranks
        self.close = weakref.finalize(self, self._threads.close)  # called at the latest when nobody has this any more

    def run(self, plan: Plan, context: StepContext, *, has_trace: bool) -> GradientChanges:
        """Run one step or evaluation on all ranks.

        Returns:
            The changes of the gradients, which can still be undone.

        Raises:
            BaseException: what the first failing rank raised; gradients are then as they were before.
        """
        self.wait_for_late_ranks()  # before this step remembers gradients that they may still add to
        scopes = {} if context.loss is None else scopes_of(self._stages, self._second, context.loss, len(self._stages))
        changes = GradientChanges(scopes)
        transport = LocalTransport(plan.schedule, plan.channels)
        control = Control(plan.schedule.num_ranks)
        trace = Trace(plan.schedule) if has_trace else None
        reduce = None if self._second is None else Reductions(plan.schedule, self._second.weights).reduce

        def stop() -> None:
            control.stop()
            transport.abort()

        def undo_late(ranks: Collection[int]) -> None:
            last = [action for rank in ranks if (action := control.last_seen[rank])]
            changes.undo_late([key for action in last for key in _changed_by(action, plan.schedule)])

        def work(rank: int) -> None:
            own = self._on(rank, plan.schedule.placement)
            table = table_of(own, plan, scopes, transport, context, self._second, reduce)
            writes = unwritten(own) if len(own) > 1 and context.loss is not None else nullcontext()
            with context.ambient.entered(), torch.set_grad_enabled(context.loss is not None), writes:
                execute(plan, rank, table, transport, control, trace)
                if context.loss is not None and any(len(self._stages) - 1 in stages for stages in own):
                    context.loss.add_up()

        tasks = [partial(work, rank) for rank in range(plan.schedule.num_ranks)]
        self._threads.run(tasks, stop=stop, undo=changes.undo, undo_late=undo_late)
        self.peak_live_slots = tuple(transport.peak_live_slots)
        self.trace = trace
        return changes

    def close_after(self, error: BaseException | None) -> None:
        """End the threads: there is nobody to tell why."""
        del error
        self.close()

    def agree(self, verdict: Callable[[], Verdict] | None) -> Verdict | None:
        """End a call: with one process there is nobody to ask."""
        return verdict() if verdict else None

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        """Every process's payload: there is one."""
        del what
        return [payload]

    def gather_ties(self) -> None:
        """Bring shares of gradients together that are in other processes: none are."""

    def to_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every process's tensors."""
        return dict(tensors)

    def to_one(self, values: dict[str, Any], rank: int) -> dict[str, Any]:
        """Every process's values, whatever the rank: they are all here."""
        del rank
        return values

    def from_last(self, value: Any) -> Any:
        """What the process of the last stage has."""
        return value

    def _on(self, rank: int, placement: Placement) -> list[dict[int, Stage]]:
        """The stages of a rank, for each replica."""
        replicas = [self._stages] if self._second is None else [self._stages, self._second.stages]
        return [
            {index: replicas[replica][index] for index in placement.stages_of(rank, replica)}
            for replica in range(placement.num_replicas)
        ]


def _changed_by(action: Action, schedule: Schedule) -> list[tuple[int, int]]:
    """The replicas and stages whose gradients an action may change."""
    if action.kind is Kind.REDUCE_GRAD:
        return [(replica, action.stage) for replica in range(schedule.placement.num_replicas)]
    return [(schedule.replica_of(action.microbatch), action.stage)] if action.kind in BACKWARD_KINDS else []
