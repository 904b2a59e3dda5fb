"""Whether glue gives what its recording says, where numbers that were drawn or read may make it another shape."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pipeloom.batch.trees import flatten
from pipeloom.recording.ops import Op, Same
from pipeloom.standins.glue import exchanged, tensors_in
from pipeloom.standins.placeholder import Placeholder, computing
from pipeloom.standins.spec import form


def is_as_recorded(
    op: Op, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], around: AbstractContextManager[Any]
) -> bool:
    """Whether glue gives tensors of the recorded shapes and types.

    Args:
        op: its recording.
        func: what is called.
        args: placeholders, and real tensors that all stages have.
        kwargs: likewise.
        around: put around the call.
    """
    given = tensors_in((args, kwargs), [])
    args, kwargs = exchanged(args, _fresh), exchanged(dict(kwargs), _fresh)
    try:
        with torch.no_grad(), computing(), around:
            made = flatten(func(*args, **kwargs))[0]
    except Exception:  # a new dry run says what is wrong, if anything is
        return False
    recorded = [given[each.position] if type(each) is Same else each for each in op.outputs[: op.num_returned]]
    return [form(each) for each in made] == [form(each) for each in recorded]


def _fresh(tensor: Tensor) -> Tensor:
    """Not the recording's own placeholder, whose shape or graph the call might change."""
    return Placeholder.like(tensor, is_leaf=True) if isinstance(tensor, Placeholder) else tensor
