"""What a checkpoint holds besides tensors, as JSON that gives back what was put in.

Plain JSON is lossy in silence: the keys of ``{30: 1}`` come back as text, and a scheduler's milestones are never met
again; a pair comes back as a list; infinity is no JSON at all. A pickle keeps all of that, and runs whatever it is
told to. Here what JSON lacks is written as an object with one key: ``{"$float": "inf"}``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from pipeloom.archive.shard import DTYPES
from pipeloom.errors import CheckpointError

_MARK: Final = "$"


def encode(value: Any, place: str) -> Any:
    """Return JSON from which `decode` makes an equal value.

    Args:
        value: None, numbers, text, tensors of one number, and lists, tuples, dicts and Counters of those.
        place: what it is, for the error.

    Raises:
        CheckpointError: something else; names its place and type.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, (list, tuple)):
        items = [encode(each, f"{place}[{index}]") for index, each in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _encoded_mapping(value, place)
    if isinstance(value, Tensor) and value.dim() == 0 and _dtype_name(value) in DTYPES:
        return {"$tensor": [_dtype_name(value), encode(value.item(), place)]}
    raise CheckpointError(
        f"{place} is of type {type(value).__name__}, which cannot be saved without a program to load it",
        "save numbers, text, lists and dicts; parameters and buffers go into the model",
    )


def decode(value: Any) -> Any:
    """Return what `encode` was given.

    Raises:
        ValueError, TypeError, KeyError: it was not made by `encode`.
    """
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((mark, content), *others) = value.items() or [("", None)]
    if not others and mark.startswith(_MARK):
        return _MAKERS[mark](decode(content))
    return {key: decode(each) for key, each in value.items()}


def _encoded_mapping(value: Mapping[Any, Any], place: str) -> dict[str, Any]:
    is_plain = all(isinstance(key, str) and not key.startswith(_MARK) for key in value)
    if is_plain and not isinstance(value, Counter):
        return {key: encode(each, f"{place}[{key!r}]") for key, each in value.items()}
    mark = "$counter" if isinstance(value, Counter) else "$dict"
    return {mark: [[encode(key, place), encode(each, f"{place}[{key!r}]")] for key, each in value.items()]}


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _tensor(content: list[Any]) -> Tensor:
    name, number = content
    if name not in DTYPES:
        raise ValueError(f"there is no dtype {name!r}")
    return torch.tensor(number, dtype=getattr(torch, name), device="cpu")


_MAKERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "$float": float,
    "$tuple": tuple,
    "$tensor": _tensor,
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}
