"""Does a checkpoint belong to this model?  Asked before anything is loaded, answered by name and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

from torch import Tensor

from pipeloom.archive.group import ALONE, Group, gather_json
from pipeloom.archive.shard import Form
from pipeloom.errors import CheckpointError

_MOST_SHOWN: Final = 5


def check_same_model(saved: Mapping[str, Any], model: Mapping[str, Any], place: object, group: Group = ALONE) -> None:
    """Compare a checkpoint's parameters and buffers with the model's; collective.

    Args:
        saved: name → tensor or form, of the whole model.
        model: what this rank holds of it.
        place: where the checkpoint is, for the error.
        group: the ranks that hold the model together.

    Raises:
        CheckpointError: names that only one of them has, or shapes or dtypes that differ; the same on every rank.
    """
    absent = [name for name in model if name not in saved]
    reshaped = [
        f"{name} {_form(saved[name])} in the checkpoint, {_form(model[name])} in the model"
        for name in model
        if name in saved and _form(saved[name]) != _form(model[name])
    ]
    everyones = gather_json(group, [[*model], absent, reshaped], "the comparison of checkpoint and model")
    names, absent, reshaped = ([*dict.fromkeys(chain(*each))] for each in zip(*everyones, strict=True))
    known = {*names}
    lines = [
        *_listed("only in the checkpoint", [name for name in saved if name not in known]),
        *_listed("only in the model", absent),
        *_listed("of another form", reshaped),
    ]
    if lines:
        raise CheckpointError(
            "\n".join([f"{place} is a checkpoint of another model:", *lines]),
            "give the model flags of the run that saved it, or start a new run without --resume",
        )


def _listed(title: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    rest = f", and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return [f"  {title}: {', '.join(names[:_MOST_SHOWN])}{rest}"]


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value) if isinstance(value, Form) else "no tensor"
