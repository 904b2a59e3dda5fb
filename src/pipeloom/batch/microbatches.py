"""A batch becomes micro-batches, and their outputs become one output again.

torch.distributed.pipelining chunks *every* tensor along dimension 0, whatever its size, and joins every output by
concatenation: a mask of another length is cut too, and a mean of each micro-batch comes back as a list. Here the
batch has one size; what has it in front is cut, what has none is shared, anything else must be said.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeloom.batch.containers import Container, leaves, opened, rebuilt
from pipeloom.errors import BatchError


@dataclass(frozen=True)
class Replicated:
    """A value that every micro-batch gets whole, whatever its dimension 0 happens to be.

    Args:
        value: a tensor, or a container of tensors; the model sees it without this wrapper.
    """

    value: Any


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
    """Rows of the batch: dimension 0 of the first tensor that has a dimension and is not `Replicated`.

    Raises:
        BatchError: there is no such tensor.
    """
    return _first(_tensors(args, kwargs, target), args, kwargs)[1].shape[0]


def split_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, num_microbatches: int
) -> list[MicrobatchInputs]:
    """Cut a batch into micro-batches whose sizes differ by at most one, the larger ones first (contract 11).

    Tensors with the batch's rows are cut along dimension 0, as views. Tensors without dimensions, values that are
    no arrays, and what is wrapped in `Replicated` go to every micro-batch as they are.

    Raises:
        BatchError: no tensor has a dimension; there are fewer rows than micro-batches; a tensor has other rows; an
            array is no tensor.
    """
    found = list(_tensors(args, kwargs, target))
    num_rows = _first(found, args, kwargs)[1].shape[0]
    _check_count(num_rows, num_microbatches)
    _check_rows(found)
    smaller, num_larger = divmod(num_rows, num_microbatches)
    sizes = [smaller + (microbatch < num_larger) for microbatch in range(num_microbatches)]
    starts = itertools.accumulate(sizes, initial=0)
    return [_rows(args, kwargs, target, start, size) for start, size in zip(starts, sizes, strict=False)]


def merge_outputs(outputs: Sequence[Any], num_samples: Sequence[int]) -> Any:
    """Join the outputs of the micro-batches, leaf by leaf (contract 8).

    Tensors with as many rows as their micro-batch, in every micro-batch, are concatenated along dimension 0.
    Floating tensors without dimensions become their mean, weighted by ``num_samples``. All other values must be
    equal in all micro-batches. The output of a single micro-batch is returned as it is.

    Args:
        outputs: per micro-batch, what the model returned.
        num_samples: per micro-batch, its rows.

    Raises:
        BatchError: containers differ, a value differs, or tensors cannot be concatenated.
    """
    if not outputs or len(outputs) != len(num_samples):
        raise BatchError(f"{len(outputs)} outputs were given for {len(num_samples)} micro-batches; each needs one")
    return outputs[0] if len(outputs) == 1 else _merge("output", outputs, num_samples)


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that have a dimension and are not replicated, by path."""
    roots = (("args", tuple(args)), ("kwargs", dict(kwargs)), ("target", target))
    for root, value in roots:
        for path, leaf in leaves(root, value, atoms=Replicated):
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
                yield path, leaf
            elif not isinstance(leaf, torch.Tensor | torch.Size):
                _refuse_array(path, leaf)


def _refuse_array(path: str, leaf: Any) -> None:
    """An array of numpy (or a frame) has rows as a tensor has; whole, it would be right for no micro-batch."""
    if getattr(leaf, "shape", ()):
        raise BatchError(
            f"{path} is a {type(leaf).__name__} of shape {tuple(leaf.shape)}; only tensors are cut into micro-batches",
            f"pass torch.as_tensor({path}), or pipeloom.Replicated({path}) if every micro-batch is to get it whole",
        )


def _first(
    found: Iterable[tuple[str, torch.Tensor]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, torch.Tensor]:
    for each in found:
        return each
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


def _check_rows(found: Sequence[tuple[str, torch.Tensor]]) -> None:
    first_path, first = found[0]
    for path, tensor in found:
        if tensor.shape[0] != first.shape[0]:
            raise BatchError(
                f"{path} has shape {tuple(tensor.shape)}, but the batch has {first.shape[0]} samples (dimension 0 of "
                f"{first_path}); a tensor is cut along dimension 0 with the batch",
                f"wrap it, pipeloom.Replicated({path}), if every micro-batch is to get it whole",
            )


def _rows(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, start: int, num_samples: int
) -> MicrobatchInputs:
    return MicrobatchInputs(
        args=tuple(_cut(each, start, num_samples) for each in args),
        kwargs={name: _cut(each, start, num_samples) for name, each in kwargs.items()},
        target=_cut(target, start, num_samples),
        num_samples=num_samples,
    )


def _cut(value: Any, start: int, num_samples: int) -> Any:
    if value is None:
        return None
    if isinstance(value, Replicated):
        return value.value
    if isinstance(value, torch.Tensor):
        narrow = value.narrow if value.layout is torch.strided else value.narrow_copy  # a sparse one has no views
        return narrow(0, start, num_samples) if value.dim() else value
    container = opened(value)
    if container is None:
        return value
    return rebuilt(value, container, [_cut(child, start, num_samples) for child in container.children.values()])


def _merge(path: str, values: Sequence[Any], num_samples: Sequence[int]) -> Any:
    containers = [opened(value) for value in values]
    first = containers[0]
    for microbatch, (value, container) in enumerate(zip(values, containers, strict=True)):
        _check_alike(path, (0, values[0], first), (microbatch, value, container))
    if first is None:
        return _merge_leaf(path, values, num_samples)
    levels = [container.children for container in containers if container is not None]
    children = [_merge(path + name, [level[name] for level in levels], num_samples) for name in first.children]
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


def _merge_leaf(path: str, values: Sequence[Any], num_samples: Sequence[int]) -> Any:
    if not isinstance(values[0], torch.Tensor):
        return _equal(path, values, _is_equal)
    if all(value.dim() and value.shape[0] == count for value, count in zip(values, num_samples, strict=True)):
        return _concatenated(path, values)
    if all(value.dim() == 0 and value.is_floating_point() for value in values):
        return _weighted_mean(values, num_samples)
    return _equal(path, values, _is_same_tensor)


def _concatenated(path: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    for microbatch, value in enumerate(values):
        if value.shape[1:] != values[0].shape[1:]:
            raise BatchError(
                f"{path} has shape {tuple(values[0].shape)} in micro-batch 0 and {tuple(value.shape)} in micro-batch "
                f"{microbatch}; only dimension 0 may differ where outputs are concatenated",
                "pad the inputs to one length, or reduce the output to one value per sample",
            )
    return torch.cat(list(values))


def _weighted_mean(values: Sequence[torch.Tensor], num_samples: Sequence[int]) -> torch.Tensor:
    """In at least float32: a sum in bfloat16 would lose what the micro-batches computed."""
    dtype = torch.promote_types(values[0].dtype, torch.float32)
    total = sum(num_samples)
    weighted = [value.to(dtype) * (count / total) for value, count in zip(values, num_samples, strict=True)]
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
