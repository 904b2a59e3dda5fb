"""What a run of a model changes besides gradients, and how it was before.

A trial run is a run: BatchNorm counts it, a forward that writes ``self.last = x`` or into its input has done so, and
whatever drew random numbers has moved the generator on. Training would go on from another place than without the
trial. So all of it is noted before, and put back after.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.trees import flatten
from pipeloom.runtime.buffer_history import copied

Undo = Callable[[], None]


@contextmanager
def as_before(root: nn.Module, batch: Any) -> Iterator[None]:
    """Leave everything but gradients as it was, however the block ends.

    Args:
        root: its buffers, plain attributes, modes and ``requires_grad`` flags are put back; weights that a forward
            writes into are not, since a copy of all of them may not fit.
        batch: its tensors are put back.
    """
    undos = [_random_states(), _attributes(root), _buffers(root), _flags(root), _contents(batch)]
    try:
        yield
    finally:
        for undo in undos:
            undo()


def _random_states() -> Undo:
    numpy: Any = sys.modules.get("numpy")
    has_cuda = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    own, cpu = random.getstate(), torch.default_generator.get_state()
    of_numpy = numpy.random.get_state() if numpy else None
    cuda = torch.cuda.get_rng_state_all() if has_cuda else []

    def undo() -> None:
        random.setstate(own)
        torch.default_generator.set_state(cpu)
        if numpy:
            numpy.random.set_state(of_numpy)
        if has_cuda:
            torch.cuda.set_rng_state_all(cuda)

    return undo


def _attributes(root: nn.Module) -> Undo:
    before = [(module, dict(vars(module))) for module in root.modules()]

    def undo() -> None:
        for module, attributes in before:
            now = vars(module)
            if now.keys() != attributes.keys() or any(now[name] is not each for name, each in attributes.items()):
                now.clear()
                now.update(attributes)

    return undo


def _buffers(root: nn.Module) -> Undo:
    copies: dict[int, Tensor] = {}
    before = [
        (module, name, buffer, copied(buffer, copies))
        for module in root.modules()
        for name, buffer in module._buffers.items()
    ]

    def undo() -> None:
        for module, name, buffer, copy in before:
            module._buffers[name] = buffer
            if buffer is not None and copy is not None:
                _write(buffer, copy)

    return undo


def _flags(root: nn.Module) -> Undo:
    before = [(parameter, parameter.requires_grad) for parameter in root.parameters()]

    def undo() -> None:
        for parameter, is_trained in before:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)

    return undo


def _contents(batch: Any) -> Undo:
    tensors = {id(leaf): leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)}
    before = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]

    def undo() -> None:
        for tensor, copy in before:
            _write(tensor, copy)

    return undo


@torch.no_grad()
def _write(tensor: Tensor, copy: Tensor) -> None:
    """Write what changed. Not told by ``_version``: batch_norm writes running statistics without counting it up."""
    if tensor.is_meta or tensor.is_inference():
        return
    is_same = tensor.layout is torch.strided and (
        torch.equal(tensor, copy) or bool(((tensor == copy) | (tensor.isnan() & copy.isnan())).all())
    )
    if not is_same:
        tensor.detach().copy_(copy)
