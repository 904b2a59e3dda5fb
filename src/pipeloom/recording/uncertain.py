"""Which shapes depend on numbers, because they are made of one that does.

A stage that doesn't have the numbers would answer a question about such a shape with that of the dry run. So what is
given a tensor of an uncertain shape is called again on placeholders of other shapes, with no row and with some more:
what comes out in the shape of the dry run each time (a sum over the rows, ``index_add_`` into a tensor of a size of its
own) is certain, and what doesn't is uncertain too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.batch.trees import flatten, unflatten
from pipeloom.recording.ops import Op
from pipeloom.standins.placeholder import Placeholder, computing

_OTHERS = ((0, 0), (1, 7))
"""Other sizes (times, and more): no row tells ``x[:2]`` from what is certain; some functions fail on no row."""

Again = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def mark(tensor: Placeholder, shapes: Collection[torch.Size]) -> None:
    """Note of what a unit returned that its shape depends on numbers.

    Args:
        tensor: the placeholder for it.
        shapes: those it had with other numbers.
    """
    tensor.is_uncertain = True
    tensor.others = ()
    if any(len(each) != tensor.dim() for each in shapes):
        return
    is_sure = [all(each[i] == size for each in shapes) for i, size in enumerate(tensor.shape)]
    for times, more in _OTHERS:
        sizes = [size if sure else size * times + more for size, sure in zip(tensor.shape, is_sure, strict=True)]
        tensor.others += (torch.empty(sizes, dtype=tensor.dtype, device="meta"),)


def follow(op: Op, given: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], again: Again) -> None:
    """Note which outputs of a call have uncertain shapes because something that it was given has one.

    Args:
        op: the call.
        given: the tensors that it may use.
        args: of the call.
        kwargs: likewise.
        again: calls it with other ones.
    """
    if not any(_is_uncertain(each) for each in given):
        return
    new = {i: each for i, each in enumerate(op.outputs) if _is_new(op, i, each, given)}
    if not new:
        return
    leaves = flatten((args, kwargs))[0]
    can_vary = all(any(each is leaf for leaf in leaves) for each in given if _is_uncertain(each))
    is_plain = not any(callable(leaf) for leaf in leaves)  # of what the user's code does, once is enough
    tries = [_outcome(args, kwargs, i, again) if can_vary and is_plain else None for i in range(len(_OTHERS))]
    for i, tensor in new.items():
        others = tuple(_meta_of(outcome, i) for outcome in tries)
        shapes = [each.shape for each in others if each is not None]
        if tensor.dim() > 0 and (not shapes or any(shape != tensor.shape for shape in shapes)):
            tensor.is_uncertain, tensor.others = True, others


def _is_uncertain(value: Any) -> bool:
    return isinstance(value, Placeholder) and value.is_uncertain


def _is_new(op: Op, leaf: int, output: Any, given: Sequence[Tensor]) -> bool:
    is_made = isinstance(output, Placeholder) and leaf not in op.targets and leaf not in op.holders
    return is_made and not any(output is each for each in given)


def _outcome(args: tuple[Any, ...], kwargs: dict[str, Any], which: int, again: Again) -> list[Any] | None:
    """The leaves that come out with other shapes; None where it fails on them."""
    leaves, structure = flatten((args, kwargs))
    made: dict[int, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, Placeholder) and id(leaf) not in made:
            meta = leaf.meta if not leaf.is_uncertain else leaf.others[which] if leaf.others else None
            if meta is None:
                return None
            made[id(leaf)] = Placeholder(meta, leaf.device)
    try:
        with computing(), torch.no_grad():
            return flatten(again(*unflatten([made.get(id(leaf), leaf) for leaf in leaves], structure)))[0]
    except Exception:  # the real call fails likewise, or the sizes of two are bound to each other
        return None


def _meta_of(outcome: list[Any] | None, leaf: int) -> Tensor | None:
    value = None if outcome is None or leaf >= len(outcome) else outcome[leaf]
    if isinstance(value, Placeholder):
        return value.meta
    return value.to("meta") if isinstance(value, Tensor) else None
