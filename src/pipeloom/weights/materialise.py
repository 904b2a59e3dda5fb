"""The parameters of a stage, from the file to where they are used, one tensor at a time.

``load_state_dict`` needs a second copy of all that it loads; ``assign=True`` does without, but unties what is tied and
takes over the file's dtypes and flags. Here one tensor is on its way at any moment, and each parameter object stays
the one that the model's modules share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pipeloom.errors import CheckpointError
from pipeloom.weights.become import become, like
from pipeloom.weights.match import Match, Place, held_at
from pipeloom.weights.stored import Source


def materialise(
    places: Iterable[Place],
    matched: Match,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> None:
    """Give the parameters and buffers at ``places`` their values, on ``device``.

    At its peak this takes what the places own and one tensor. Parameters that are real already (an earlier call made
    them) stay as they are; buffers that are not stored keep the values that the model was built with.

    Args:
        places: what to make; the other places of a tied parameter are made with it.
        matched: what they are made of: `pipeloom.weights.match.match`.
        device: where the tensors go.
        dtype: of floating-point parameters; by default what each has in the model. Buffers keep their own.

    Raises:
        CheckpointError: a file cannot be read, or has different values for two names of a tied parameter.
    """
    groups: dict[int, tuple[Tensor, list[Place]]] = {}
    for place in places:
        tensor = held_at(*place[1:])
        if tensor is not None:
            groups.setdefault(id(tensor), (tensor, []))[1].append(place)
    for tensor, shared in groups.values():
        if isinstance(tensor, nn.Parameter):
            if tensor.is_meta:
                wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                _put(tensor, shared, _read(matched.names[shared[0][0]], matched.source, device, wanted))
        else:
            _put_buffer(tensor, shared, matched, device)


def _read(stored: Sequence[str], source: Source, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    tensor = source.read(stored[0], dtype)
    for other in stored[1:]:
        if not torch.equal(tensor, source.read(other, dtype)):
            raise CheckpointError(
                f"{source.path} has different values for {stored[0]!r} and {other!r}, which the model ties",
                "set the model's configuration to not tie them, or remove one of the two",
            )
    return tensor.to(device)


def _put(parameter: nn.Parameter, places: Iterable[Place], values: Tensor) -> None:
    made = like(parameter, values)
    if become(parameter, made):
        return
    for _, module, attribute in places:  # somebody holds it weakly: at least these modules have the new one
        setattr(module, attribute, made)


def _put_buffer(buffer: Tensor, places: Sequence[Place], matched: Match, device: torch.device | str) -> None:
    stored = matched.names[places[0][0]]
    made = _read(stored, matched.source, device, buffer.dtype) if stored else buffer.to(device)
    for _, module, attribute in places:
        module._buffers[attribute] = made
