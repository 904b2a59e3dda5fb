"""The smallest thing that a cut can separate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from pipeloom.splitting.unpacking import Signature


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that lives whole in one stage.

    Args:
        name: its name in the whole model.
        module: the module itself, not a copy.
        signature: how it takes a container from the unit before; None: whole, as in a Sequential.
    """

    name: str
    module: nn.Module
    signature: Signature | None = None

    def __call__(self, value: Any) -> Any:
        """Call the module on what the unit before it returned."""
        return self.module(value) if self.signature is None else self.signature.called(self.module, value)
