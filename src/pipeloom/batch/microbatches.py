"""A batch becomes micro-batches, and their outputs become one output again.

torch.distributed.pipelining chunks *every* tensor along dimension 0, whatever its size, and joins every output by
concatenation: a mask of another length is cut too, and a mean of each micro-batch comes back as a list. Here the
batch has one size; what has it in front is cut, what has none is shared, lists with one entry per sample are cut as
lists, and rows that are a whole number for each sample stay with it. Anything else must be said.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeloom.batch.containers import Container, leaves, opened, rebuilt
from pipeloom.errors import BatchError, PipeloomWarning

_CALLER = 4
"""Frames from the warning up to whoever called `Pipeline.step`."""
_Shares = Sequence[tuple[int, float]]
"""Per micro-batch, its rows and what its scalars weigh."""


@dataclass(frozen=True)
class Replicated:
    """A value that every micro-batch gets whole, whatever its dimension 0 happens to be.

    Args:
        value: a tensor, or a container of tensors; the model sees it without this wrapper.
    """

    value: Any


@dataclass(frozen=True)
class PerSample:
    """A list with one entry for each sample, as detectors take their targets: every micro-batch gets its own entries.

    A list that has as many entries as the batch has samples is taken so without being told, unless its tensors have
    that many rows too.

    Args:
        values: the entries, of any kind; the model sees a plain list.
    """

    values: Sequence[Any]


@dataclass(frozen=True)
class MicrobatchInputs:
    """What one micro-batch passes to the model and the loss.

    Args:
        args: positional arguments; tensors are views ``(num_samples, ...)`` of the batch's.
        kwargs: keyword arguments, likewise.
        target: the target of the loss, likewise; None if there is none.
        num_samples: rows of this micro-batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    num_samples: int


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any], target: Any = None) -> int:
    """Samples of the batch: dimension 0 of the first tensor that has one and is not `Replicated`, or its `PerSample`.

    Raises:
        BatchError: there is neither.
    """
    return _first(_parts(args, kwargs, target), args, kwargs)[1]


def split_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, num_microbatches: int
) -> list[MicrobatchInputs]:
    """Cut a batch into micro-batches whose sizes differ by at most one, the larger ones first (contract 11).

    Tensors with the batch's rows are cut along dimension 0, as views; so are those with a whole number of rows for
    each sample, with a warning (patches of images, frames of a film). A list with an entry for each sample is cut as a
    list. Tensors without dimensions, values that are no arrays, and what is wrapped in `Replicated` go to every
    micro-batch as they are; and if there is but one micro-batch, all does.

    Raises:
        BatchError: no tensor has a dimension; there are fewer rows than micro-batches; a tensor has other rows; an
            array is no tensor; a list may be meant one way or the other.
    """
    first_path, num_rows = _first(_parts(args, kwargs, target), args, kwargs)
    _check_count(num_rows, num_microbatches)
    if num_microbatches == 1:
        return [MicrobatchInputs(_whole(tuple(args)), _whole(dict(kwargs)), _whole(target), num_rows)]
    for path, each in _parts(args, kwargs, target, num_rows):
        _check_rows(path, each, first_path, num_rows)
    smaller, num_larger = divmod(num_rows, num_microbatches)
    sizes = [smaller + (microbatch < num_larger) for microbatch in range(num_microbatches)]
    ends = list(itertools.accumulate(sizes, initial=0))
    return [_rows(args, kwargs, target, range(*bounds), num_rows) for bounds in itertools.pairwise(ends)]


def merge_outputs(outputs: Sequence[Any], num_samples: Sequence[int], weights: Sequence[float] | None = None) -> Any:
    """Join the outputs of the micro-batches, leaf by leaf (contract 8).

    Tensors with as many rows as their micro-batch, in every micro-batch, are concatenated along dimension 0; so are
    those with a whole number of rows for each sample, unless they are equal in all.
    Floating tensors without dimensions become their mean, weighted by ``weights``. All other values must be
    equal in all micro-batches. The output of a single micro-batch is returned as it is.

    Args:
        outputs: per micro-batch, what the model returned.
        num_samples: per micro-batch, its rows.
        weights: per micro-batch, what its scalars weigh; default its rows. What weighs nothing may be NaN.

    Raises:
        BatchError: containers differ, a value differs, or tensors cannot be concatenated.
    """
    if not outputs or len(outputs) != len(num_samples):
        raise BatchError(f"{len(outputs)} outputs were given for {len(num_samples)} micro-batches; each needs one")
    shares = [(rows, rows if weights is None else weights[i]) for i, rows in enumerate(num_samples)]
    return outputs[0] if len(outputs) == 1 else _merge("output", outputs, shares)


def _parts(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, num_rows: int | None = None
) -> Iterator[tuple[str, torch.Tensor | PerSample]]:
    """What is cut, by path: tensors that have a dimension and are not replicated, and lists with entries for samples.

    Which lists those are is known when the number of samples is.
    """
    for root, value in (("args", tuple(args)), ("kwargs", dict(kwargs)), ("target", target)):
        yield from _parts_of(root, value, num_rows)


def _parts_of(path: str, value: Any, num_rows: int | None) -> Iterator[tuple[str, torch.Tensor | PerSample]]:
    if isinstance(value, Replicated):
        return
    found = value if num_rows is None else _as_entries(path, value, num_rows)
    container = None if isinstance(found, PerSample) else opened(found)
    if isinstance(found, PerSample) or (isinstance(found, torch.Tensor) and found.dim() > 0):
        yield path, found
    elif container is not None:
        for name, child in container.children.items():
            yield from _parts_of(path + name, child, num_rows)
    elif not isinstance(found, torch.Tensor | torch.Size):
        _refuse_array(path, found)


def _as_entries(path: str, value: Any, num_rows: int) -> Any:
    """A plain list with an entry for each sample as `PerSample`; other values as they are."""
    if type(value) is not list or len(value) != num_rows or num_rows < 2 or len(set(map(type, value))) > 1:
        return value
    tensors = [leaf for _, leaf in leaves(path, value) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    if not tensors:
        return value
    if all(tensor.shape[0] == num_rows for tensor in tensors):
        raise BatchError(
            f"{path} is a list of {num_rows} entries for a batch of {num_rows} samples, and its tensors have "
            f"{num_rows} rows too: one entry for each sample, or tensors of the whole batch?",
            f"pass pipeloom.PerSample({path}), or tuple({path}) if each tensor is to be cut",
        )
    return PerSample(value)


def _refuse_array(path: str, leaf: Any) -> None:
    """An array of numpy (or a frame) has rows as a tensor has; whole, it would be right for no micro-batch."""
    if getattr(leaf, "shape", ()):
        raise BatchError(
            f"{path} is a {type(leaf).__name__} of shape {tuple(leaf.shape)}; only tensors are cut into micro-batches",
            f"pass torch.as_tensor({path}), or pipeloom.Replicated({path}) if every micro-batch is to get it whole",
        )


def _first(
    found: Iterable[tuple[str, torch.Tensor | PerSample]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, int]:
    for path, each in found:
        return path, len(each.values) if isinstance(each, PerSample) else each.shape[0]
    raise BatchError(
        f"{len(args)} arguments and {len(kwargs)} keyword arguments were given, and no tensor with a dimension among "
        "them or in the target; the batch is cut along dimension 0 of its tensors",
        "pass the batch as tensors of shape (batch, ...)",
    )


def _check_count(num_rows: int, num_microbatches: int) -> None:
    if num_microbatches < 1:
        raise BatchError(f"{num_microbatches} micro-batches were asked for; at least 1 is needed")
    if num_rows < num_microbatches:
        raise BatchError(
            f"a batch of {num_rows} samples was given for {num_microbatches} micro-batches; each needs at least one",
            "pass a larger batch, or use fewer micro-batches",
        )


def _as_many_rows_each(path: str, num_samples: int, first_path: str, num_rows: int) -> str:
    """A hint for several texts to an image, all of the texts first: OWL-ViT's processor gives them so."""
    rows_each, rest = divmod(num_rows, max(num_samples, 1))
    if rest or num_samples < 2:
        return ""
    return (
        f"; or, if the batch has {num_samples} samples with {rows_each} rows of {first_path} each, give {path} before "
        f"{first_path}: the first tensor says how many there are"
    )


def _check_rows(path: str, found: torch.Tensor | PerSample, first_path: str, num_rows: int) -> None:
    if isinstance(found, PerSample):
        if len(found.values) != num_rows:
            raise BatchError(
                f"{path} has entries for {len(found.values)} samples, but the batch has {num_rows} (dimension 0 of "
                f"{first_path})",
                "give one entry for each sample",
            )
        return
    rows_each, rest = divmod(found.shape[0], num_rows)
    if rest or not rows_each:
        raise BatchError(
            f"{path} has shape {tuple(found.shape)}, but the batch has {num_rows} samples (dimension 0 of "
            f"{first_path}); a tensor is cut along dimension 0 with the batch",
            f"wrap it, pipeloom.Replicated({path}), if every micro-batch is to get it whole"
            + _as_many_rows_each(path, found.shape[0], first_path, num_rows),
        )
    if rows_each > 1:
        warnings.warn(
            f"{path} has {found.shape[0]} rows for {num_rows} samples (dimension 0 of {first_path}): {rows_each} "
            f"consecutive rows are taken to belong to each sample; wrap it, pipeloom.Replicated({path}), if every "
            "micro-batch is to get it whole",
            PipeloomWarning,
            stacklevel=_CALLER,
        )


def _rows(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, samples: range, num_rows: int
) -> MicrobatchInputs:
    return MicrobatchInputs(
        args=tuple(_cut(each, samples, num_rows) for each in args),
        kwargs={name: _cut(each, samples, num_rows) for name, each in kwargs.items()},
        target=_cut(target, samples, num_rows),
        num_samples=len(samples),
    )


def _cut(value: Any, samples: range, num_rows: int) -> Any:
    value = _as_entries("", value, num_rows)
    if isinstance(value, Replicated):
        return value.value
    if isinstance(value, PerSample):
        return list(value.values[samples.start : samples.stop])
    if isinstance(value, torch.Tensor):
        if not value.dim():
            return value
        rows = value.shape[0] // num_rows
        narrow = value.narrow if value.layout is torch.strided else value.narrow_copy  # a sparse one has no views
        return narrow(0, samples.start * rows, len(samples) * rows)
    container = opened(value)
    if container is None:
        return value
    return rebuilt(value, container, [_cut(child, samples, num_rows) for child in container.children.values()])


def _whole(value: Any) -> Any:
    """The same without wrappers."""
    if isinstance(value, Replicated):
        return value.value
    if isinstance(value, PerSample):
        return list(value.values)
    container = opened(value)
    if container is None:
        return value
    return rebuilt(value, container, [_whole(child) for child in container.children.values()])


def _merge(path: str, values: Sequence[Any], shares: _Shares) -> Any:
    containers = [opened(value) for value in values]
    first = containers[0]
    for microbatch, (value, container) in enumerate(zip(values, containers, strict=True)):
        _check_alike(path, (0, values[0], first), (microbatch, value, container))
    if first is None:
        return _merge_leaf(path, values, shares)
    levels = [container.children for container in containers if container is not None]
    children = [_merge(path + name, [level[name] for level in levels], shares) for name in first.children]
    return rebuilt(values[0], first, children)


def _check_alike(path: str, one: tuple[int, Any, Container | None], other: tuple[int, Any, Container | None]) -> None:
    """Two containers of one type with the same names in them, or two leaves."""
    is_alike = _structure(*one[1:]) == _structure(*other[1:])
    if not is_alike:
        raise BatchError(
            f"{path} is {_outline(*one[1:])} in micro-batch {one[0]} and {_outline(*other[1:])} in micro-batch "
            f"{other[0]}; outputs are merged leaf by leaf and need the same structure"
        )


def _structure(value: Any, container: Container | None) -> tuple[Any, ...]:
    if container is None:
        return (isinstance(value, torch.Tensor),)
    return type(value), container.children.keys(), container.static


def _outline(value: Any, container: Container | None) -> str:
    kind = "a tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    return kind if container is None else f"{kind} of {', '.join(container.children) or 'nothing'}"


def _merge_leaf(path: str, values: Sequence[Any], shares: _Shares) -> Any:
    if not isinstance(values[0], torch.Tensor):
        return _equal(path, values, _is_equal)
    if all(value.dim() and value.shape[0] == rows for value, (rows, _) in zip(values, shares, strict=True)):
        return _concatenated(path, values)
    if _has_rows_for_samples(values, shares) and not all(_is_same_tensor(values[0], each) for each in values):
        return _concatenated(path, values)
    if all(value.dim() == 0 and value.is_floating_point() for value in values):
        return _weighted_mean(values, [weight for _, weight in shares])
    return _equal(path, values, _is_same_tensor)


def _has_rows_for_samples(values: Sequence[torch.Tensor], shares: _Shares) -> bool:
    """Whether each has the same whole number of rows, above one, for every sample of its micro-batch."""
    if not all(value.dim() and rows for value, (rows, _) in zip(values, shares, strict=True)):
        return False
    found = {divmod(value.shape[0], rows) for value, (rows, _) in zip(values, shares, strict=True)}
    return len(found) == 1 and all(rows_each > 1 and not rest for rows_each, rest in found)


def _concatenated(path: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    for microbatch, value in enumerate(values):
        if value.shape[1:] != values[0].shape[1:]:
            raise BatchError(
                f"{path} has shape {tuple(values[0].shape)} in micro-batch 0 and {tuple(value.shape)} in micro-batch "
                f"{microbatch}; only dimension 0 may differ where outputs are concatenated",
                "pad the inputs to one length, or reduce the output to one value per sample",
            )
    return torch.cat(list(values))


def _weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """In at least float32: a sum in bfloat16 would lose what the micro-batches computed."""
    dtype = torch.promote_types(values[0].dtype, torch.float32)
    total = sum(weights)
    counted = [(value, weight / total) for value, weight in zip(values, weights, strict=True) if weight]
    weighted = [value.to(dtype) * share for value, share in counted] or [values[0].to(dtype) * math.nan]
    return torch.stack(weighted).sum().to(values[0].dtype)


def _equal(path: str, values: Sequence[Any], is_equal: Callable[[Any, Any], bool]) -> Any:
    for microbatch, value in enumerate(values):
        if not is_equal(values[0], value):
            raise BatchError(
                f"{path} is {_shown(values[0])} in micro-batch 0 and {_shown(value)} in micro-batch {microbatch}; what "
                "is neither a tensor with the batch's rows nor a floating scalar must be equal in all of them",
                "return it as a tensor with one row per sample, or leave it out of the output",
            )
    return values[0]


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    result = one == other
    return bool(result.all()) if hasattr(result, "all") else bool(result)  # numpy compares element by element


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}" if value.numel() > 8 else str(value)
