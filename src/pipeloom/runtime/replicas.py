"""Two replicas of the model on the same ranks: each rank has a table of handlers for either.

A micro-batch runs through one replica from end to end, so neither table knows of the other one. What both replicas add
up for a weight becomes one gradient by REDUCE_GRAD, which both ranks of a stage have in their programs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from pipeloom.batch.losses import StepLoss
from pipeloom.errors import SplitError
from pipeloom.ir import Action, Kind, Schedule
from pipeloom.runtime.buffer_history import version
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.executor import Handler, Plan
from pipeloom.runtime.gradients import GradientScope
from pipeloom.runtime.handlers import RankHandlers
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.transport.base import Transport

Scopes = Mapping[tuple[int, int], GradientScope]
"""By replica and stage."""


class Weights(Protocol):
    """The weights of a second replica, by stage; `pipeloom.splitting.replica.Replica` is one."""

    def loss_of(self, loss: StepLoss) -> StepLoss:
        """A step's losses as the second replica finds them."""

    def leaves(self, stage: int) -> list[nn.Parameter]:
        """The first replica's."""

    def copies(self, stage: int) -> list[nn.Parameter]:
        """The second's, in the same order."""

    def shares(self, stage: int) -> list[Tensor | None]:
        """What the second replica has added up; it has nothing left then."""

    def add(self, stage: int, shares: Sequence[Tensor | None]) -> None:
        """Add that to the first replica's gradients."""


@dataclass(frozen=True)
class Second:
    """The second replica.

    Args:
        stages: those that are here, by index.
        weights: of all stages.
    """

    stages: Mapping[int, Stage]
    weights: Weights


def table_of(
    replicas: Sequence[Mapping[int, Stage]],
    plan: Plan,
    scopes: Scopes,
    transport: Transport,
    context: StepContext,
    second: Second | None,
    reduce: Callable[[int], None] | None,
) -> Mapping[Kind, Handler]:
    """The handlers of one rank for one step.

    Args:
        replicas: the rank's stages, for each replica that the schedule runs.
        plan: what runs.
        scopes: the gradients that backwards may add to.
        transport: carries what leaves the rank.
        context: what the step is about.
        second: the second replica.
        reduce: called with the stage of each REDUCE_GRAD; None where there is one replica.
    """
    made = []
    for replica, stages in enumerate(replicas):
        own = {stage: scope for (which, stage), scope in scopes.items() if which == replica}
        if replica and context.loss is not None and second is not None:
            context = replace(context, loss=second.weights.loss_of(context.loss))
        schedule = plan.schedule
        handlers = RankHandlers(
            stages, schedule.num_stages, own, transport, context, schedule.links, plan.split, plan.recomputed
        )
        made.append(handlers.table)
    if len(made) == 1 or reduce is None:
        return made[0]
    table = {kind: _of_replica(kind, made, plan.schedule) for kind in made[0]}
    return table | {Kind.REDUCE_GRAD: lambda action, _: reduce(action.stage)}


def _of_replica(kind: Kind, tables: Sequence[Mapping[Kind, Handler]], schedule: Schedule) -> Handler:
    handlers = [table[kind] for table in tables]

    def handle(action: Action, given: tuple[Any, ...]) -> Any:
        return handlers[schedule.replica_of(action.microbatch)](action, given)

    return handle


def scopes_of(
    stages: Mapping[int, Stage], second: Second | None, loss: StepLoss, num_stages: int
) -> dict[tuple[int, int], GradientScope]:
    """What a step may do to gradients in this process: the last stage also computes the loss."""
    found: dict[tuple[int, int], GradientScope] = {}
    for replica, here in enumerate([stages] if second is None else [stages, second.stages]):
        parameters = {index: list(stage.module.parameters()) for index, stage in here.items()}
        known = {id(each) for each_stage in parameters.values() for each in each_stage}
        rule = loss.rule if second is None or not replica else second.weights.loss_of(loss).rule
        if num_stages - 1 in parameters:
            parameters[num_stages - 1] += [each for each in rule.parameters if id(each) not in known]
        found |= {(replica, index): GradientScope(each) for index, each in parameters.items()}
    return found


class Reductions:
    """Adds the gradients of both replicas up where both are in this process: whichever rank comes last does it.

    Args:
        schedule: what runs.
        weights: of the second replica.
    """

    def __init__(self, schedule: Schedule, weights: Weights) -> None:
        both = [stage for stage in range(schedule.num_stages) if _are_apart(stage, schedule)]
        self._missing = Counter(both)
        self._lock = threading.Lock()
        self._weights = weights

    def reduce(self, stage: int) -> None:
        """Called by each rank that holds the stage, when it has added up all its micro-batches there."""
        with self._lock:
            is_first = self._missing[stage] > 0
            self._missing[stage] -= 1
        if not is_first:
            self._weights.add(stage, self._weights.shares(stage))


def _are_apart(stage: int, schedule: Schedule) -> bool:
    """Whether two ranks reduce a stage: not where one holds it twice, or one replica has no micro-batch."""
    return len(set(schedule.placement.ranks_of(stage))) == 2 and schedule.num_microbatches > 1


@contextmanager
def unwritten(replicas: Sequence[Mapping[int, Stage]]) -> Iterator[None]:
    """Around the step of a rank with two replicas: no forward may write buffers or weights, of which there is one set.

    Raises:
        SplitError: one did.
    """
    before = [(i, *found) for stages in replicas for i, stage in stages.items() for found in _tensors(stage.module)]
    yield
    for index, module, name, tensor, old in before:
        is_weight = isinstance(tensor, nn.Parameter)
        may_be_replaced = is_weight or name in module._non_persistent_buffers_set
        if version(tensor) != old or not (may_be_replaced or module._buffers.get(name) is tensor):
            raise SplitError(
                f"the forward of stage {index} wrote the {'weight' if is_weight else 'buffer'} {name!r} of a "
                f"{type(module).__name__}; the schedule runs two replicas of the model at the same time, which have "
                "one set of them, and would write it in any order",
                "take a schedule with a single replica",
            )


def _tensors(stage: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, int]]:
    for module in stage.modules():
        for name, tensor in (*module._buffers.items(), *module._parameters.items()):
            if tensor is not None:
                yield module, name, tensor, version(tensor)
