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
        for place, (buffer, old_version, copy) in before.items():
            module, name = place
            if module._buffers.get(name) is not buffer or version(buffer) != old_version:
                past = self._present.pop(place)
                past.is_over, past.value = True, copy


def copied(buffer: Tensor | None, copies: dict[int, Tensor]) -> Tensor | None:
    """A copy; one for all places of a buffer that is shared, as noted in ``copies``."""
    if buffer is None:
        return None
    if id(buffer) not in copies:
        copies[id(buffer)] = buffer.detach().clone()
    return copies[id(buffer)]


def version(tensor: Tensor | None) -> int:
    """What changes with every write; a tensor made in inference mode counts none, and torch lets nobody write."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version
