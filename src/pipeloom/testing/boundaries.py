"""What a cut would carry at each place where the model can be cut, not only where it was."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from pipeloom.outline.description import split
from pipeloom.recording.ops import Recording
from pipeloom.splitting import Cuts, Inputs
from pipeloom.splitting import split as split_model
from pipeloom.splitting.dataflow import flow


def bytes_at(
    model: nn.Module | Sequence[nn.Module], inputs: Inputs, num_stages: int, cuts: Cuts | None = None
) -> tuple[int, ...]:
    """What a cut before each call of a unit would carry, in bytes; index 0 is no cut.

    Args:
        model: a module; of a list of stages nothing is known, since it can be cut nowhere else.
        inputs: of one micro-batch.
        num_stages: as it is cut; how deep its units lie depends on it.
        cuts: likewise.
    """
    if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList) or num_stages < 2:
        return ()
    made = split_model(model, num_stages=None if cuts else num_stages, cuts=cuts, inputs=inputs)
    return _in_chain(model, inputs, len(made.units)) if made.cut is None else _in_recording(made.cut.first)


def _in_chain(model: nn.Module, inputs: Inputs, num_calls: int) -> tuple[int, ...]:
    values = split(model, *inputs, cuts=list(range(1, num_calls))).values or ()
    return tuple(sum(each.num_bytes for each in values if each.from_stage == k - 1) for k in range(num_calls))


def _in_recording(recording: Recording) -> tuple[int, ...]:
    num_calls = len(recording.unit_ops)
    sizes = [0]
    for k in range(1, num_calls):
        crossing = flow(recording, [int(index >= k) for index in range(num_calls)], 2).stages[0].outgoing
        forms = [recording.forms[value] for value in crossing]
        sizes.append(sum(math.prod(form.shape) * form.dtype.itemsize for form in forms))
    return tuple(sizes)
