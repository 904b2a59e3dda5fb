"""One stage of the model on its rank: the user's own modules, called in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from pipeloom.runtime.boundary import InputUse
from pipeloom.runtime.selective import RunAgain

Draws = Callable[[str, int], AbstractContextManager[Any]]
"""``draws(unit, call)``: put it around one call of a unit."""
Part = Callable[[Any, tuple[tuple[Any, ...], dict[str, Any]], Sequence[Any], Draws], tuple[Any, tuple[Any, ...]]]
"""``part(plan, inputs, received, draws)`` → the model's output if this is the last stage, and what other stages get."""


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
        part: of a model that was cut by running it, its part of a forward; None calls the units in order.
        parents: the buffers of the modules around its units, in such a model.
        again: the modules of it whose forward runs again in the backward.
    """

    def __init__(
        self,
        index: int,
        units: Sequence[Unit],
        *,
        device: torch.device | None = None,
        part: Part | None = None,
        parents: nn.Module | None = None,
        again: Sequence[RunAgain] = (),
    ) -> None:
        self.part = part
        self.index = index
        self.units = tuple(units)
        self.device = device
        self.module = nn.ModuleList([unit.module for unit in units] + ([] if parents is None else [parents]))
        self.input_use = InputUse(self.module)
        self.again = tuple(again)
        if device is not None:
            self.module.to(device)

    def __call__(self, value: Any, draws: Draws) -> Any:
        """Run the units one after another, each inside its ``draws``."""
        for position, unit in enumerate(self.units):
            with draws(unit.name, 0):
                if self.index == 0 and position == 0:
                    args, kwargs = value
                    value = unit.module(*args, **kwargs)
                else:
                    value = unit(value)
        return value
