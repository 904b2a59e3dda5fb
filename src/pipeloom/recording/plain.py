"""Numbers, flags and text among what a unit returns, and shapes that depend on numbers.

Only tensors travel, so every other stage goes on with those of the dry run. That is right for what is made of shapes
and settings. What is made of numbers, the dry run has of numbers that were made up: where two kinds of these give two
values, another stage gets an `Unknown` in their place, and may not ask for a shape of which there are two. Where a
value seemed certain, and is another one after all, the stage of the unit says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.batch.trees import LEAF, flatten
from pipeloom.errors import UncuttableCode
from pipeloom.recording import uncertain
from pipeloom.recording.ops import Op
from pipeloom.recording.shared import is_same
from pipeloom.standins.placeholder import Placeholder
from pipeloom.standins.unknown import Unknown

_PLAIN = (bool, int, float, str)
_VARIANTS = (1, 2, 3)
"""Kinds of numbers to try: a flag (``x.mean() > 0``) may be alike for two."""


def note(op: Op, shapes: Collection[torch.Size], again: Callable[[int], Any] | None) -> None:
    """Note the plain values that a unit has returned.

    Args:
        op: its call.
        shapes: of what it was given; what it returns of one of these is taken to depend on no number.
        again: calls it with other numbers that are made up, which it is told; None where it had none, and so has not
            looked at any.
    """
    op.plain = {i: each for i, each in enumerate(op.outputs[: op.num_returned]) if isinstance(each, _PLAIN)}
    tensors = {i: each for i, each in enumerate(op.outputs[: op.num_returned]) if isinstance(each, Placeholder)}
    is_sure = not op.plain and all(each.shape in shapes for each in tensors.values())
    if again is None or is_sure:
        return
    found: dict[int, list[torch.Size]] = defaultdict(list)
    for variant in _VARIANTS:
        try:
            leaves = flatten(again(variant))[0]
        except Exception:  # not every module takes any numbers; what is uncertain then is found by `check`
            continue
        for i in list(op.plain):
            if len(leaves) != op.num_returned or not is_same(leaves[i], op.plain[i]):
                del op.plain[i]
                op.outputs[i] = Unknown(f"what {op.what!r} returned besides tensors")
        for i, tensor in tensors.items():
            now = leaves[i] if i < len(leaves) else None
            if isinstance(now, Tensor) and now.shape != tensor.shape:
                found[i].append(now.shape)
    for i, others in found.items():
        uncertain.mark(tensors[i], others)


def check(op: Op, out: Any) -> None:
    """Raise for plain values that are not those by which other stages go.

    Args:
        op: a unit's call.
        out: what it has returned now.

    Raises:
        UncuttableCode: they are others, or are at other places.
    """
    if op.structure is LEAF and not op.plain:
        return
    leaves: Sequence[Any] = flatten(out)[0]
    if len(leaves) != op.num_returned:
        raise _other(op, f"{len(leaves)} values", f"{op.num_returned}")
    for i, then in op.plain.items():
        if not is_same(leaves[i], then) and then == then:
            raise _other(op, repr(leaves[i]), repr(then))


def _other(op: Op, now: str, then: str) -> UncuttableCode:
    return UncuttableCode(
        f"{op.what!r} (call {op.call + 1}) returned {now}, where it returned {then} when the model was cut; other "
        "stages go on with the latter, because only tensors travel between them",
        "return it as a tensor, which other stages get; or keep the code that uses it in the same module",
    )
