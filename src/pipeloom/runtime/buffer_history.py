"""What a stage's buffers held when a forward read them, for the recompute that comes later.

Between a forward and its recompute other micro-batches run, and their forwards may write buffers: the power iteration
of spectral normalisation, a moving average that scales activations. A recompute that reads what is there *then*
computes another function than its forward did, and nothing says so.

Copying all buffers for every micro-batch would cost as much as masks and tables weigh. Here a value is copied before
a forward and kept only if that forward writes over it, once for all micro-batches that read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]


@dataclass(slots=True)
class PastValue:
    """What a buffer held for a while.

    Args:
        is_over: it holds something else by now, and this is ``value``.
        value: None also for a buffer that is None.
    """

    is_over: bool = False
    value: Tensor | None = None


Snapshot = Mapping[Place, PastValue]


class BufferHistory:
    """The buffers of one stage during one step.

    Args:
        module: the stage's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._present: dict[Place, PastValue] = {}

    @contextmanager
    def forward(self) -> Iterator[Snapshot]:
        """Put this around a forward; what it gives says what the buffers held when that began."""
        copies: dict[int, Tensor] = {}
        before = {
            (each, name): (buffer, version(buffer), copied(buffer, copies))
            for each in self._module.modules()
            for name, buffer in each._buffers.items()
        }
        snapshot = {place: self._present.setdefault(place, PastValue()) for place in before}
        yield snapshot
        for (module, name), (buffer, old_version, copy) in before.items():
            if dict(module._buffers.items()).get(name) is not buffer or version(buffer) != old_version:
                past = self._present.pop((module, name))
                past.is_over, past.value = True, copy


class OwnBuffers:
    """Parts what a stage returns from the buffers that it goes on writing into.

    A stage may return a buffer: a counter, a running mean. In a plain loop the rest of the model has read it before the
    next micro-batch writes it; here another rank reads it whenever it comes to it. So it leaves as a copy, unless
    nothing was written since it left the last time: masks and tables are copied once.

    Args:
        module: the stage's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._versions: dict[int | None, int] = {}

    def part(self, tensor: Tensor) -> Tensor:
        """What of an output leaves the stage, without its graph."""
        if tensor.requires_grad or not any(
            storage(tensor) == storage(each) is not None for each in self._module.buffers()
        ):
            return tensor.detach()
        before, now = self._versions.get(storage(tensor)), version(tensor)
        self._versions[storage(tensor)] = now
        return tensor.detach() if before == now else tensor.detach().clone()


def copied(buffer: Tensor | None, copies: dict[int, Tensor]) -> Tensor | None:
    """A copy; one for all places of a buffer that is shared, as noted in ``copies``."""
    if buffer is not None and id(buffer) not in copies:
        copies[id(buffer)] = buffer.detach().clone()
    return copies.get(id(buffer))


def version(tensor: Tensor | None) -> int:
    """What changes with every write; a tensor made in inference mode counts none, and torch lets nobody write."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def storage(tensor: Tensor) -> int | None:
    """Which memory a tensor lies in; None for those that have no storage of their own, as sparse ones."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
