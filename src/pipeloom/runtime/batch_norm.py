"""BatchNorm's running statistics in a pipeline, and buffers during a recompute.

BatchNorm normalises by micro-batch, always: statistics of the whole batch would need every micro-batch on a stage
before the first could leave it. The running statistics, which only evaluation reads, do not wait for anything. Left
alone they are updated once per micro-batch: the same means over time, but a momentum that acts ``num_microbatches``
times as often, and variances that miss what differs between micro-batches. `DeferredStatistics` updates them once per
step, to what one forward of the whole batch gives (the idea of torchgpipe's ``DeferredBatchNorm``). Gradients
still differ from those of a whole batch.

A recompute is a second forward of the same micro-batch; `frozen_buffers` keeps it from updating anything twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from pipeloom.errors import SplitError
from pipeloom.runtime.buffer_history import PastValue, Snapshot, copied

_thread = threading.local()


class _Moments(NamedTuple):
    """Of ``num_values`` per channel: their mean, and the sum of squared distances from it, of shape [channels]."""

    num_values: int
    mean: Tensor
    squares: Tensor


class DeferredStatistics:
    """Running statistics of all BatchNorm layers of a module, updated once per step as by one full batch.

    Between `begin` and `commit` (or `discard`) the layers neither read nor write their running statistics, and their
    forwards, whichever thread runs them, note the moments of their input.

    Args:
        module: the layers' owner; a module without BatchNorm layers is fine.

    Raises:
        SplitError: a layer is a `SyncBatchNorm`, whose batch is spread over processes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = {
            name: _DeferredLayer(layer)
            for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm) and layer.track_running_stats
        }
        for name, deferred in self._layers.items():
            if isinstance(deferred.layer, nn.SyncBatchNorm):
                raise SplitError(
                    f"batch_norm='deferred' was given and layer {name!r} is a SyncBatchNorm; a BatchNorm is needed, "
                    "because the moments noted here are those of one process",
                    "use batch_norm='per-microbatch', or BatchNorm instead of SyncBatchNorm.",
                )

    @contextmanager
    def during(self, num_microbatches: int) -> Iterator[None]:
        """Put this around a step: it updates running statistics once, if the step succeeds."""
        self.begin(num_microbatches)
        try:
            yield
        except BaseException:
            self.discard()
            raise
        self.commit()

    def begin(self, num_microbatches: int = 1) -> None:
        """Before the first forward of a step; what a failed step left behind is dropped.

        Args:
            num_microbatches: needed only where a layer runs several times in one forward: a whole batch would
                then update it once per run, so runs are told apart.
        """
        for deferred in self._layers.values():
            deferred.begin(num_microbatches)

    def commit(self) -> None:
        """After the last forward of a step: update the running statistics."""
        for deferred in self._layers.values():
            deferred.end()
            deferred.update()

    def discard(self) -> None:
        """End the step without updating anything: it failed, or its loss was not finite. `commit` then does nothing."""
        for deferred in self._layers.values():
            deferred.end()
            deferred.forget()


class _DeferredLayer:
    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self._num_microbatches = 1
        self._runs: list[_Moments] = []
        self._hook: RemovableHandle | None = None

    def begin(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self.forget()
        if self._hook is None:
            self._hook = self.layer.register_forward_pre_hook(self._note)
        # In training, a layer that does not track normalises by micro-batch all the same.
        self.layer.track_running_stats = False

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self.layer.track_running_stats = True

    def forget(self) -> None:
        self._runs = []

    def update(self) -> None:
        """One update for each run of the layer within a forward, in order."""
        runs, num_microbatches = self._runs, self._num_microbatches
        per_forward = len(runs) // num_microbatches if len(runs) % num_microbatches == 0 else 1
        for run in range(min(per_forward, len(runs))):
            self._update(_joined(runs[run::per_forward]))
        self.forget()

    def _note(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if layer.training and not _is_second_forward():
            self._runs.append(_moments(inputs[0]))

    @torch.no_grad()
    def _update(self, moments: _Moments) -> None:
        # A layer that tracks has its three buffers; to the type checker they may be None.
        layer: Any = self.layer
        layer.num_batches_tracked.add_(1)
        weight = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        layer.running_mean.lerp_(moments.mean.to(layer.running_mean.dtype), weight)
        variance = moments.squares / (moments.num_values - 1)  # of a single value torch normalises nothing
        layer.running_var.lerp_(variance.to(layer.running_var.dtype), weight)


def _is_second_forward() -> bool:
    """A recompute: R of the schedule, or torch.utils.checkpoint inside a unit, whose recompute runs in the backward."""
    return getattr(_thread, "is_frozen", False) or torch._C._current_graph_task_id() != -1


@torch.no_grad()
def _moments(values: Tensor) -> _Moments:
    """Moments per channel of a tensor of shape [batch, channels, ...]."""
    wide = values.detach().to(torch.promote_types(values.dtype, torch.float32))
    dims = [dim for dim in range(wide.dim()) if dim != 1]
    num_values = wide.numel() // wide.shape[1]
    variance, mean = torch.var_mean(wide, dims, correction=0)
    return _Moments(num_values, mean, variance * num_values)


def _joined(runs: Iterable[_Moments]) -> _Moments:
    """Moments of all values together: stable, where a difference of summed squares is not.

    Source: Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983, equations 2.1.
    """
    first, *others = runs
    for other in others:
        num_values = first.num_values + other.num_values
        delta = other.mean - first.mean
        mean = first.mean + delta * (other.num_values / num_values)
        squares = first.squares + other.squares + delta.square() * (first.num_values * other.num_values / num_values)
        first = _Moments(num_values, mean, squares)
    return first


@contextmanager
def frozen_buffers(module: nn.Module, snapshot: Snapshot | None = None) -> Iterator[None]:
    """Let forwards read the module's buffers, and drop what they write: for a recompute.

    Buffers are swapped for clones, so that autograd's graph of the recompute keeps its own; all of them, since a write
    through ``.data`` leaves no trace by which the written ones could be told. `DeferredStatistics` notes nothing.

    Args:
        module: it must not run in another thread meanwhile.
        snapshot: what the buffers held at an earlier time, which is what forwards read; by default what they hold now.
    """
    saved = [(each, dict(each._buffers)) for each in module.modules() if each._buffers]
    past, copies = snapshot or {}, dict[int, Tensor]()
    was_frozen = getattr(_thread, "is_frozen", False)
    _thread.is_frozen = True
    try:
        for each, buffers in saved:
            each._buffers.update(
                {name: copied(_read(past.get((each, name)), b), copies) for name, b in buffers.items()}
            )
        yield
    finally:
        _thread.is_frozen = was_frozen
        for each, buffers in saved:
            # Never empty: a stage that calls the same layer, with the same buffers, may read them in another thread.
            each._buffers.update(buffers)
            for name in each._buffers.keys() - buffers.keys():
                del each._buffers[name]


def _read(past: PastValue | None, present: Tensor | None) -> Tensor | None:
    return past.value if past is not None and past.is_over else present
