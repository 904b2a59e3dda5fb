"""Does a checkpoint belong to this model?  Asked before anything is loaded, answered by name and shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from torch import Tensor

from pipeloom.errors import CheckpointError

_MOST_SHOWN: Final = 5


def check_same_model(saved: Mapping[str, Tensor], model: Mapping[str, Tensor], place: object) -> None:
    """Compare a checkpoint's parameters and buffers with the model's.

    Raises:
        CheckpointError: names that only one of them has, or shapes or dtypes that differ.
    """
    common = [name for name in model if name in saved]
    reshaped = [
        f"{name} {_form(saved[name])} in the checkpoint, {_form(model[name])} in the model"
        for name in common
        if _form(saved[name]) != _form(model[name])
    ]
    lines = [
        *_listed("only in the checkpoint", (name for name in saved if name not in model)),
        *_listed("only in the model", (name for name in model if name not in saved)),
        *_listed("of another form", reshaped),
    ]
    if lines:
        raise CheckpointError(
            "\n".join([f"{place} is a checkpoint of another model:", *lines]),
            "give the model flags of the run that saved it, or start a new run without --resume",
        )


def _listed(title: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    if not names:
        return []
    rest = f", and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return [f"  {title}: {', '.join(names[:_MOST_SHOWN])}{rest}"]


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
