"""One stage of the model on its rank: the user's own modules, called in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from pipeloom.runtime.boundary import InputUse
from pipeloom.runtime.draw_key import DrawKey
from pipeloom.runtime.draws import drawing
from pipeloom.runtime.foreign_draws import ForeignDraws


class Unit(Protocol):
    """A module that lives whole in one stage; `pipeloom.splitting.Unit` is one."""

    @property
    def name(self) -> str:
        """Its name in the whole model."""

    @property
    def module(self) -> nn.Module:
        """What runs."""

    def __call__(self, value: Any) -> Any:
        """Run it on what the unit before returned."""


class Stage:
    """The units of one stage.

    Args:
        index: position in model order; the input of stage 0 is the model's, positional and keyword arguments.
        units: what it runs, in call order.
        device: where it lives; None leaves everything where it is.
        has_recompute: only its input is kept between forward and backward.
    """

    def __init__(
        self,
        index: int,
        units: Sequence[Unit],
        *,
        device: torch.device | None = None,
        has_recompute: bool = False,
    ) -> None:
        self.index = index
        self.units = tuple(units)
        self.device = device
        self.has_recompute = has_recompute
        self.module = nn.ModuleList(unit.module for unit in units)
        self.input_use = InputUse(self.module)
        if device is not None:
            self.module.to(device)

    def __call__(self, value: Any, keys: Sequence[DrawKey], foreign: ForeignDraws | None = None) -> Any:
        """Run the units; ``keys`` holds one random key per unit, ``foreign`` refuses draws that no key can reach."""
        for position, (unit, key) in enumerate(zip(self.units, keys, strict=True)):
            with drawing(key, foreign=foreign):
                if self.index == 0 and position == 0:
                    args, kwargs = value
                    value = unit.module(*args, **kwargs)
                else:
                    value = unit(value)
        return value
