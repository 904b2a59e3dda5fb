"""The gradients during one step: add up as autograd does, or come back as they were.

A step is a transaction: if it fails, the gradients that were there before it are there again (contract 14).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from pipeloom.errors import RuntimeStateError


class GradientScope:
    """What a step may do to the gradients of some parameters.

    Args:
        parameters: those of one stage; their present gradients are remembered, with one copy of each that exists.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._before: list[tuple[nn.Parameter, Tensor | None, Tensor | None]] = [
            (p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in dict.fromkeys(parameters)
        ]
        self._is_apart = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Whose gradients they are."""
        return [parameter for parameter, _, _ in self._before]

    def set_apart(self) -> None:
        """Collect this step's gradients by themselves, to be scaled before they join the earlier ones."""
        if not self._is_apart:
            self._is_apart = True
            for parameter, _, _ in self._before:
                parameter.grad = None

    @torch.no_grad()
    def finish(self, scale: float) -> None:
        """Scale the gradients that were set apart and add them to the earlier ones."""
        if not self._is_apart:
            return
        for parameter, earlier, _ in self._before:
            if parameter.grad is None:
                parameter.grad = earlier
                continue
            parameter.grad.mul_(scale)
            if earlier is not None:
                parameter.grad = earlier.add_(parameter.grad)

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what was there before the step."""
        for parameter, earlier, copy in self._before:
            if earlier is not None and copy is not None:
                earlier.copy_(copy)
            parameter.grad = earlier

    @torch.no_grad()
    def drop_late(self) -> None:
        """Drop what was added since `restore`, but leave a gradient alone that the caller has dropped meanwhile."""
        for parameter, earlier, copy in self._before:
            if earlier is None or parameter.grad is not earlier:
                parameter.grad = None
            elif copy is not None:
                earlier.copy_(copy)


class GradientChanges:
    """What one step did to the gradients of all stages.

    Args:
        scopes: by replica and stage, the gradients that the step may change.
        failed: called with what ended the step, when it is undone.
    """

    def __init__(
        self,
        scopes: Mapping[tuple[int, int], GradientScope] | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.scopes = scopes or {}
        self._failed = failed

    def finish(self, scale: float) -> None:
        """Scale what was set apart and add it to earlier gradients."""
        for scope in self.scopes.values():
            scope.finish(scale)

    def __enter__(self) -> Self:
        """What runs inside belongs to the step: if it fails, the step is undone."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is not None:
            self.undo()
            if self._failed is not None:
                self._failed(error)

    def undo(self) -> None:
        """Put the gradients back as they were before the step."""
        for scope in self.scopes.values():
            scope.restore()

    def undo_late(self, stages: Collection[tuple[int, int]]) -> None:
        """Drop what backwards of ``stages``, named by replica and stage, added that went on after `undo`."""
        for stage in stages:
            self.scopes[stage].drop_late()


def set_grad_dtype(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Let autograd accumulate the gradients of floating parameters in ``dtype``.

    Raises:
        RuntimeStateError: this torch has no ``Tensor.grad_dtype``, or a gradient of another dtype is there already.
    """
    for parameter in parameters:
        if parameter.is_floating_point() and getattr(parameter, "grad_dtype", parameter.dtype) != dtype:
            _check_grad_dtype(parameter, dtype)
            parameter.grad_dtype = dtype


def _check_grad_dtype(parameter: nn.Parameter, wanted: torch.dtype) -> None:
    if not hasattr(parameter, "grad_dtype"):
        raise RuntimeStateError(
            f"grad_dtype={wanted} was given, but torch {torch.__version__} accumulates in the parameter's dtype only",
            "use a torch whose tensors have grad_dtype (2.10 or later), or leave grad_dtype out",
        )
    if not wanted.is_floating_point:
        raise RuntimeStateError(f"grad_dtype={wanted} was given; a floating dtype is needed", "pass torch.float32")
    if parameter.grad is not None and parameter.grad.dtype != wanted:
        raise RuntimeStateError(
            f"grad_dtype={wanted} was asked for, but a parameter has a gradient in {parameter.grad.dtype} already",
            "call zero_grad() before",
        )
