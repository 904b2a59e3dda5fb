"""Modules of TorchScript: one piece each, whose insides are not Python's, so no clone could have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Scripted(nn.Module):
    """The clone of a scripted module: it runs the module itself, which stays as it is.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["scripted"] = module
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it without TorchScript's kernels, which have no shape function; its buffers are as before."""
        module: nn.Module = self.__dict__["scripted"]
        before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        try:
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
                return module(*args, **kwargs)
        finally:
            with torch.no_grad():
                for buffer, copy in before:
                    buffer.copy_(copy)


def is_scripted(module: nn.Module) -> bool:
    """Whether it is one."""
    return isinstance(module, torch.jit.ScriptModule)


def modules_of(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a tree by name, without those within scripted ones."""
    within: str | None = None
    for name, module in root.named_modules():
        if within is None or not name.startswith(within):
            yield name, module
            if is_scripted(module):
                within = f"{name}." if name else ""
