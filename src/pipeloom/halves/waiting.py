"""Gradients that I has left for W, in the order in which the whole backward would have used them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

Task = list[tuple[GradientEdge, Tensor, int]]
"""Edges, their gradients, and when these came."""


class Waiting:
    """Where W begins: places in small graphs, and the gradients that came to them.

    The engine walks nodes in the reverse order of their making, and adds up what comes to a parameter before it adds
    that to ``.grad``. One walk from all places at once therefore adds as the whole backward does. A reentrant
    checkpoint runs a backward inside the backward, which adds to ``.grad`` by itself: its places are a task of their
    own, run in the order in which such backwards ended. A parameter that is used inside and outside of one is added in
    each as soon as its last use has passed, which need not be that order.

    Attributes:
        is_collecting: whether I runs now.
    """

    def __init__(self) -> None:
        self.is_collecting = False
        self._tasks: dict[int, Task] = {}
        self._ended: list[int] = []
        self._num_added = 0

    def add(self, edge: GradientEdge, grad: Tensor) -> None:
        """Keep a gradient until `run`; called by nodes while I passes them."""
        number = torch._C._current_graph_task_id()
        task = self._tasks.get(number)
        if task is None:
            task = self._tasks[number] = []
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._ended.append(number))
        task.append((edge, grad, self._num_added))
        self._num_added += 1

    def run(self, parameters: Iterable[Tensor], shared: Mapping[int, Tensor]) -> None:
        """W: add to the gradients of ``parameters`` as autograd does, and free everything.

        Args:
            parameters: whose gradients come in W.
            shared: those of them that are used in several tasks, by their ids.
        """
        tasks = [self._tasks.pop(number) for number in self._ended]
        self._ended.clear()
        if len(tasks) > 1:
            for parameter in shared.values():
                _add_by_last_use(tasks, parameter)
        else:
            shared = {}
        # Named, because the activations that small graphs begin with would get theirs again.
        leaves = tuple(each for each in parameters if id(each) not in shared)
        while tasks and leaves:
            _walk(tasks.pop(0), leaves)

    def drop(self) -> None:
        """Forget everything, after an error."""
        self._tasks.clear()
        self._ended.clear()

    def __len__(self) -> int:
        return sum(map(len, self._tasks.values()))


def _walk(task: Task, leaves: tuple[Tensor, ...], *, keeps_graph: bool = False) -> None:
    edges, grads, _ = zip(*task, strict=True)
    _engine_run_backward(edges, grads, keeps_graph, False, leaves, allow_unreachable=True, accumulate_grad=True)


def _add_by_last_use(tasks: list[Task], parameter: Tensor) -> None:
    """Add the gradient of one parameter, task by task; the graphs stay for others."""
    own = [[each for each in task if _leads_to(each[0].node, parameter)] for task in tasks]
    for task in sorted(filter(None, own), key=lambda task: task[-1][2]):
        _walk(task, (parameter,), keeps_graph=True)


def _leads_to(start: Any, parameter: Tensor) -> bool:
    seen, found = set[Any](), [start]
    while found:
        node = found.pop()
        if getattr(node, "variable", None) is parameter:
            return True
        if node not in seen:
            seen.add(node)
            found += [each for each, _ in node.next_functions if each is not None]
    return False
