"""`torch.utils.checkpoint` in a parent's code, around several units.

It would run that code again in the backward, where nobody answers the calls of units: a stage would run units of
others, and glue would meet placeholders. So in a parent's code `checkpoint` calls what it is given, and each unit
within gets a checkpoint of its own: the memory of units is saved all the same, and gradients are those of any
checkpoint. Both kinds, and however the code imported it: they end in two names that torch looks up when they are called
[the same in torch 2.9 and 2.13].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from pipeloom.standins.glue import Seen, current

_generator: Any = torch_checkpoint._checkpoint_without_reentrant_generator
_Function: Any = torch_checkpoint.CheckpointFunction


def stand_in() -> None:
    """Put stand-ins where torch looks for both kinds of checkpoint; once is enough."""
    where: Any = torch_checkpoint
    where._checkpoint_without_reentrant_generator = _around
    where.CheckpointFunction = _Reentrant


def checkpointed(mode: Seen, unit: nn.Module) -> Callable[..., Any]:
    """A unit, with a checkpoint of its own where the parent's code has one around it."""
    if not mode.checkpoints or not torch.is_grad_enabled():
        return unit
    preserve, context_fn = mode.checkpoints[-1]

    def contexts() -> tuple[Any, Any]:
        (forward, again), buffers = context_fn(), Buffers(unit)
        return _both(buffers.noted(), forward), _both(buffers.put_back(), again)

    def called(*args: Any, **kwargs: Any) -> Any:
        options: dict[str, Any] = {"preserve_rng_state": preserve, "context_fn": contexts}
        return torch_checkpoint.checkpoint(unit, *args, use_reentrant=False, **options, **kwargs)

    return called


class Buffers:
    """The buffers of a unit as its forward found them, for the second forward, which updates nothing.

    torch's checkpoint lets the second forward update them too: running statistics would count a micro-batch twice, and
    in an order that the schedule decides.

    Args:
        unit: whose.
    """

    def __init__(self, unit: nn.Module) -> None:
        self._held = [each for each in unit.modules() if each._buffers]
        self._found: list[dict[str, Tensor | None]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Put this around the forward."""
        before = [{key: _copy(each) for key, each in module._buffers.items()} for module in self._held]
        versions = self._versions()
        yield
        # BatchNorm's kernel counts no version of the running mean that it writes, only of the number of batches.
        is_changed = [new != old for new, old in zip(self._versions(), versions, strict=True)]
        self._found = [copies if changed else {} for copies, changed in zip(before, is_changed, strict=True)]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put this around the second forward."""
        now = [dict(module._buffers) for module in self._held]
        for module, found in zip(self._held, self._found, strict=True):
            module._buffers.update({key: _copy(found.get(key, each)) for key, each in module._buffers.items()})
        try:
            yield
        finally:
            for module, buffers in zip(self._held, now, strict=True):
                module._buffers.update(buffers)

    def _versions(self) -> list[list[int]]:
        return [[_version(each) for each in module._buffers.values()] for module in self._held]


@contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _version(buffer: Tensor | None) -> int:
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _around(fn: Any, preserve: bool, context_fn: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
    mode = current()
    if mode is None:
        yield from _generator(fn, preserve, context_fn, *rest, **kwargs)
        return
    mode.checkpoints.append((preserve, context_fn))
    yield
    mode.checkpoints.pop()


class _Reentrant(_Function):  # type: ignore[misc]
    @classmethod
    def apply(cls, function: Any, preserve: bool, *args: Any) -> Any:
        mode = current()
        if mode is None:
            return _Function.apply(function, preserve, *args)
        mode.checkpoints.append((preserve, torch_checkpoint.noop_context_fn))
        out = function(*args)
        mode.checkpoints.pop()
        return out
