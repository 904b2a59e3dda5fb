"""Gradients that are added up in another order than the one in which backwards find them.

A stage whose backward comes in two halves adds up in the order of its Ws; what an I finds too early waits for its W.

In a pipeline each stage adds up its micro-batches in the order of its own program, and each of two replicas those that
run through it. One process that runs whole micro-batches one after another finds the gradients of all stages at once;
where its order is not a stage's, they wait until it is their turn (contract 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from pipeloom.batch.sums import added
from pipeloom.ir import Schedule

Found = list[tuple[Tensor, Tensor]]


@contextmanager
def caught(parameters: Iterable[Tensor]) -> Iterator[Found]:
    """What backwards in the block find, instead of adding it to ``.grad``; there when the block is over."""
    before = [(each, each.grad) for each in parameters if each.requires_grad]
    found: Found = []
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield found
        found += [(parameter, parameter.grad) for parameter, _ in before if parameter.grad is not None]
    finally:
        for parameter, grad in before:
            parameter.grad = grad


def add(found: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add what was caught to ``.grad``."""
    for parameter, grad in found:
        parameter.grad = added(parameter.grad, grad)


class OrderedSums:
    """Gradients of whole micro-batches, added up stage by stage in the order of a schedule.

    A stage that adds up in the order of the run is left to autograd, and costs nothing. For others the gradients of the
    micro-batches that came too early are kept.

    Args:
        stages: per stage, its parameters; no parameter is in two.
        schedule: in whose order; None is any.
        run: the micro-batches in the order in which they will run.
    """

    def __init__(
        self, stages: Sequence[Collection[nn.Parameter]], schedule: Schedule | None, run: Iterable[int]
    ) -> None:
        now, self._lanes = tuple(run), list[_Lane]()
        if schedule is None:
            return
        for stage, parameters in enumerate(stages):
            order = schedule.accumulation_order(stage)
            halves = [[each for each in order if schedule.replica_of(each) == replica] for replica in (0, 1)]
            if halves[1] or order != now:
                self._lanes += [
                    _Lane(parameters, deque(half), {} if replica else None) for replica, half in enumerate(halves)
                ]

    @contextmanager
    def taking(self, microbatch: int) -> Iterator[None]:
        """Put this around the backward of a micro-batch."""
        lanes = [lane for lane in self._lanes if microbatch in lane.due]
        with ExitStack() as stack:
            found = [stack.enter_context(caught(lane.parameters)) for lane in lanes]
            yield
        for lane, each in zip(lanes, found, strict=True):
            lane.add(microbatch, each)

    def finish(self) -> None:
        """After the last micro-batch, and before gradients are scaled: add the second replica's sums to the first's."""
        for lane in self._lanes:
            add((lane.apart or {}).items())


@dataclass(slots=True)
class _Lane:
    """One replica of one stage.

    Args:
        parameters: of the stage.
        due: the micro-batches whose gradients are still to be added, in order.
        apart: the sums so far; None: they are in ``.grad``.
        early: gradients of micro-batches whose turn has not come.
    """

    parameters: Collection[nn.Parameter]
    due: deque[int]
    apart: dict[Tensor, Tensor] | None
    early: dict[int, Found] = field(default_factory=dict)

    def add(self, microbatch: int, found: Found) -> None:
        self.early[microbatch] = found
        while self.due and self.due[0] in self.early:
            next_found = self.early.pop(self.due.popleft())
            if self.apart is None:
                add(next_found)
            else:
                self.apart.update([(each, added(self.apart.get(each), grad)) for each, grad in next_found])
