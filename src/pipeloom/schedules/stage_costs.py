"""What stages cost, as far as a generator asks: `pipeloom.cost.Costs` is one of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StageCosts(Protocol):
    """Seconds and bytes, one of each per stage."""

    @property
    def forward_s(self) -> Sequence[float]:
        """Of F."""

    @property
    def input_grad_s(self) -> Sequence[float]:
        """Of I."""

    @property
    def weight_grad_s(self) -> Sequence[float]:
        """Of W."""

    @property
    def transfer_s(self) -> float:
        """Of a value that changes its rank."""

    @property
    def bytes_held_to_input_grad(self) -> Sequence[int]:
        """What a micro-batch holds from F until I."""

    @property
    def bytes_held_to_weight_grad(self) -> Sequence[int]:
        """What of it stays from I until W."""
