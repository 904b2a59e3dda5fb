"""Calls that have to be in one stage with an earlier one, because they reach past what stages hand to each other.

A stage is given values. It is given neither the graph that made them, which `torch.autograd.grad` would walk (it would
stop where the stage begins, and leave out the rest without a word), nor what a module left in a global or an object,
where another micro-batch's may lie by then. So the dry run notes both.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.recording.ops import INPUT, Op, Value
from pipeloom.recording.refusals import line_at
from pipeloom.recording.values import Values
from pipeloom.standins.glue import tensors_in
from pipeloom.standins.placeholder import Computing, Placeholder

DIFFERENTIATES = (
    "the latter differentiates what the former makes (torch.autograd.grad), and the graph of a stage ends where the "
    "stage begins"
)
LEFT_BEHIND = (
    "the former leaves a tensor elsewhere than in what it returns (a global, a closure, an attribute or object that is "
    "not passed on), where the latter finds it; stages run at the same time, each with another micro-batch"
)
_ENDS = {Tensor.detach, torch.detach, vars(torch._C.TensorBase)["data"].__get__}
"""A graph ends there, even if the outcome is told to require a gradient."""
_GRADIENTS = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


def of_glue(ops: Sequence[Op], op: Op, given: tuple[Any, Any], values: Values) -> None:
    """Note what a call of glue differentiates.

    Args:
        ops: all so far.
        op: the call.
        given: what it was called with.
        values: of the dry run.
    """
    if op.func not in _GRADIENTS:
        return
    (args, kwargs), by = given, ()
    if op.func is torch.autograd.grad:
        by = args[1] if len(args) > 1 else kwargs["inputs"]
    elif kwargs.get("inputs"):
        by = kwargs["inputs"]
    of = args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))
    _note(ops, op, tensors_in(of, []), tensors_in(by, []), values)


def of_unit(ops: Sequence[Op], op: Op, given: Sequence[Tensor], now: Computing, values: Values) -> None:
    """Note what a call of a unit reaches besides what it was given.

    Args:
        ops: all so far.
        op: the call.
        given: its tensors.
        now: what its kernels did.
        values: of the dry run.
    """
    if now.found:
        op.bonds.update(dict.fromkeys(now.found, f"{LEFT_BEHIND} (the latter is called in {line_at(sys._getframe())})"))
    if now.has_gone_back:
        _note(ops, op, given, given, values)


def _note(ops: Sequence[Op], op: Op, of: Iterable[Tensor], by: Iterable[Tensor], values: Values) -> None:
    behind = _behind(ops, [values.of(each) for each in of if values.is_known(each)])
    starts = [values.of(each).op if values.is_known(each) else INPUT for each in by if _has_graph(each)]
    # What is no value is everywhere: the model's own input, a weight. Any call may have used it.
    found = behind if not starts or INPUT in starts else _between(ops, starts, behind)
    if found:
        op.bonds.update(dict.fromkeys(found, f"{DIFFERENTIATES} ({line_at(sys._getframe())})"))


def _has_graph(tensor: Tensor) -> bool:
    return isinstance(tensor, Placeholder) or tensor.requires_grad


def _behind(ops: Sequence[Op], values: Sequence[Value]) -> set[int]:
    """The ops that are in the graph of some values."""
    found: set[int] = set()
    open_ones = [*values]
    while open_ones:
        index, leaf = open_ones.pop()
        if index == INPUT or index in found or leaf not in ops[index].grads:
            continue
        found.add(index)
        if ops[index].func not in _ENDS:
            open_ones += ops[index].uses
    return found


def _between(ops: Sequence[Op], starts: Collection[int], behind: set[int]) -> set[int]:
    """Those of ``behind`` that were made of what ``starts`` made."""
    made = set(starts)
    for index in sorted(behind):
        if any(value.op in made for value in ops[index].uses):
            made.add(index)
    return made & behind - set(starts)
