"""The forward of the user's own model, un-pipelined: no stages, no clones of parents, no plan is followed.

It differs from ``model(*args)`` in one thing: each call of a unit, and each draw of the code between them, draws the
numbers that it draws in the pipeline (contract 3), since dropout is none of the things to be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import nn

from pipeloom.chance import AROUND
from pipeloom.halves.frozen import answered
from pipeloom.splitting import Inputs, Plan, Split
from pipeloom.standins.glue import Seen, unseen

Draws = Callable[[str, int], AbstractContextManager[Any]]


def call_whole(made: Split, plan: Plan | None, inputs: Inputs, draws: Draws) -> Any:
    """Call the model.

    Args:
        made: the model, and what its units are called.
        plan: for these inputs; None for a chain.
        inputs: positional and keyword arguments of one micro-batch.
        draws: put around calls of units, and around glue that draws.

    Returns:
        The model's output, with its graph.
    """
    if made.cut is None or plan is None:
        return _chained(made, inputs, draws)
    return _WholeCall(plan, draws).run(made.root, made.cut.units, inputs)


def _chained(made: Split, inputs: Inputs, draws: Draws) -> Any:
    first, *rest = made.units
    with draws(first.name, 0):
        value = first.module(*inputs[0], **inputs[1])
    for unit in rest:
        with draws(unit.name, 0):
            value = unit(value)
    return value


class _WholeCall:
    """One forward; counts calls as the dry run did, whose recording says what the draws of each are called."""

    def __init__(self, plan: Plan, draws: Draws) -> None:
        self._draws = draws
        ops = plan.recording.ops
        self._drawing = {op.index: (op.draw_name, op.call) for op in ops if op.has_draws and op.func is not None}
        self._mode = Seen(self._glue) if self._drawing else None
        self._num_calls: Counter[str] = Counter()
        self._next = 0
        self._is_inside = False

    def run(self, root: nn.Module, units: Any, inputs: Inputs) -> Any:
        with ExitStack() as stack:
            stack.enter_context(self._draws(AROUND, 0))
            for name in units:
                stack.enter_context(answered(root.get_submodule(name), partial(self._unit, name)))
            if self._mode is not None:
                stack.enter_context(self._mode)
            return root(*inputs[0], **inputs[1])

    def _unit(self, name: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:  # a unit that another one holds as well
            return call(*args, **kwargs)
        number = self._num_calls[name]
        self._num_calls[name] += 1
        self._next += 1
        self._is_inside = True
        try:
            with ExitStack() as stack:
                if self._mode is not None:
                    stack.enter_context(unseen(self._mode))
                stack.enter_context(self._draws(name, number))
                return call(*args, **kwargs)
        finally:
            self._is_inside = False

    def _glue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self._next
        self._next += 1
        if index not in self._drawing:
            return func(*args, **kwargs)
        with self._draws(*self._drawing[index]):
            return func(*args, **kwargs)
