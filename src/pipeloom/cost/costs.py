"""Seconds and bytes per stage, checked once, where they are made.

A cost that is negative, NaN or a stage short does not crash a simulation: it gives a figure that looks right.
So `Costs` cannot be made from such values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsFloat, TypeVar

from pipeloom.errors import CostError
from pipeloom.ir import Kind

Number = TypeVar("Number", int, float)

_SECONDS = ("forward_s", "input_grad_s", "weight_grad_s")
_BYTES = (
    "bytes_held_to_input_grad",
    "bytes_held_to_weight_grad",
    "bytes_held_to_recompute",
    "boundary_bytes",
)


@dataclass(frozen=True, slots=True)
class Costs:
    """What each action takes; `uniform` fills the tuples from single numbers.

    A transfer is needed where a value changes its rank. It takes ``transfer_s`` of pure latency, which occupies
    nobody: any number of messages can be under way. With ``transfer_bytes_per_s`` it also occupies its channel,
    the ordered pair of ranks, for bytes ÷ bandwidth, and messages of one channel queue in the order in which
    they are sent.

    Args:
        forward_s: seconds of F, per stage; R takes the same.
        input_grad_s: seconds of I, per stage.
        weight_grad_s: seconds of W, per stage; B takes I + W.
        transfer_s: latency of a transfer, in seconds.
        bytes_held_to_input_grad: what a micro-batch holds on a stage from F until I or B, per stage; () for none.
        bytes_held_to_weight_grad: what of it stays from I until W, per stage; () for none.
        bytes_held_to_recompute: what a stage that recomputes holds from F until R (its input); () for none.
        transfer_bytes_per_s: bandwidth of a channel; None: unlimited.
        overlap_s: seconds of a pair of actions that a rank runs as one, by the stage of the first; () if one runs
            after the other, and sends what the first made before the second.
        boundary_bytes: size of a message between stages ``i`` and ``i + 1``, both ways; goes with a bandwidth.

    Raises:
        CostError: a value is negative or not finite, a byte count is not whole, or lengths do not fit.
    """

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    transfer_s: float = 0.0
    bytes_held_to_input_grad: tuple[int, ...] = ()
    bytes_held_to_weight_grad: tuple[int, ...] = ()
    bytes_held_to_recompute: tuple[int, ...] = ()
    transfer_bytes_per_s: float | None = None
    boundary_bytes: tuple[int, ...] = ()
    overlap_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.forward_s:
            raise CostError("costs of no stages were given; at least one stage is needed")
        for name in (*_SECONDS, "overlap_s"):
            self._set(name, tuple(checked_seconds(name, value) for value in getattr(self, name)))
        for name in _BYTES:
            self._set(name, tuple(checked_bytes(name, value) for value in getattr(self, name)))
        self._set("transfer_s", checked_seconds("transfer_s", self.transfer_s))
        for name in _BYTES[:3]:
            self._set(name, getattr(self, name) or (0,) * self.num_stages)
        for name in (*_SECONDS, *_BYTES[:3]):
            _check_length(name, getattr(self, name), self.num_stages, "stages")
        if self.overlap_s:
            _check_length("overlap_s", self.overlap_s, self.num_stages, "stages")
        self._check_bandwidth()

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward_s: float | Sequence[float],
        input_grad_s: float | Sequence[float],
        weight_grad_s: float | Sequence[float],
        transfer_s: float = 0.0,
        bytes_held_to_input_grad: int | Sequence[int] = 0,
        bytes_held_to_weight_grad: int | Sequence[int] = 0,
        bytes_held_to_recompute: int | Sequence[int] = 0,
        transfer_bytes_per_s: float | None = None,
        boundary_bytes: int | Sequence[int] = (),
        overlap_s: float | Sequence[float] = (),
    ) -> Costs:
        """The same for every stage where a single number is given, the numbers themselves where a list is.

        Raises:
            CostError: as for the class, or there is no stage.
        """

        def per_stage(name: str, value: Number | Sequence[Number]) -> tuple[Number, ...]:
            return _per_stage(name, value, num_stages)

        return cls(
            forward_s=per_stage("forward_s", forward_s),
            input_grad_s=per_stage("input_grad_s", input_grad_s),
            weight_grad_s=per_stage("weight_grad_s", weight_grad_s),
            transfer_s=transfer_s,
            bytes_held_to_input_grad=per_stage("bytes_held_to_input_grad", bytes_held_to_input_grad),
            bytes_held_to_weight_grad=per_stage("bytes_held_to_weight_grad", bytes_held_to_weight_grad),
            bytes_held_to_recompute=per_stage("bytes_held_to_recompute", bytes_held_to_recompute),
            transfer_bytes_per_s=transfer_bytes_per_s,
            boundary_bytes=_broadcast(boundary_bytes, num_stages - 1),
            overlap_s=_broadcast(overlap_s, num_stages),
        )

    @classmethod
    def unit(cls, num_stages: int) -> Costs:
        """One tick for F, I and W, so two for B; transfers take no time."""
        return cls.uniform(num_stages, forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)

    @property
    def num_stages(self) -> int:
        """How many stages the costs are for."""
        return len(self.forward_s)

    @property
    def has_bytes(self) -> bool:
        """Whether any micro-batch holds anything."""
        return any(any(getattr(self, name)) for name in _BYTES[:3])

    def duration_s(self, kind: Kind, stage: int) -> float:
        """Seconds for which an action occupies its rank; sends and receives occupy nobody."""
        match kind:
            case Kind.FORWARD | Kind.RECOMPUTE:
                return self.forward_s[stage]
            case Kind.INPUT_GRAD:
                return self.input_grad_s[stage]
            case Kind.WEIGHT_GRAD:
                return self.weight_grad_s[stage]
            case Kind.BACKWARD:
                return self.input_grad_s[stage] + self.weight_grad_s[stage]
            case _:
                return 0.0

    def occupancy_s(self, stage: int, other: int) -> float:
        """Seconds for which a message between two stages occupies its channel; 0 without a bandwidth."""
        if self.transfer_bytes_per_s is None:
            return 0.0
        return sum(self.boundary_bytes[min(stage, other) : max(stage, other)]) / self.transfer_bytes_per_s

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_bandwidth(self) -> None:
        if self.transfer_bytes_per_s is not None:
            _check_length("boundary_bytes", self.boundary_bytes, self.num_stages - 1, "boundaries of stages")
            self._set("transfer_bytes_per_s", _positive("transfer_bytes_per_s", self.transfer_bytes_per_s))
        elif any(self.boundary_bytes):
            raise CostError(
                "boundary_bytes were given without transfer_bytes_per_s; a size alone takes no time",
                "give the bandwidth of a channel too, or the latency of a transfer as transfer_s",
            )


def checked_seconds(name: str, value: object) -> float:
    """Return ``value`` as seconds.

    Raises:
        CostError: it is no number, negative or not finite.
    """
    if not isinstance(value, SupportsFloat) or isinstance(value, bool):
        raise CostError(f"{name} holds {value!r}; a number is needed")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise CostError(f"{name} holds {number:g}; a finite number of at least 0 is needed")
    return number


def checked_bytes(name: str, value: object) -> int:
    """Return ``value`` as a whole number of bytes.

    Raises:
        CostError: it is no number, negative, not finite or not whole.
    """
    count = checked_seconds(name, value)
    if not count.is_integer():
        raise CostError(f"{name} holds {value}; a whole number of bytes is needed")
    return value if isinstance(value, int) else int(count)


def _positive(name: str, value: object) -> float:
    number = checked_seconds(name, value)
    if number == 0:
        raise CostError(f"{name} is 0; nothing would ever arrive")
    return number


def _check_length(name: str, values: Sequence[object], num_needed: int, needed: str) -> None:
    if len(values) != num_needed:
        raise CostError(
            f"{name} has {len(values)} values for {num_needed} {needed}; one for each is needed",
            "a single number counts for all of them",
        )


def _per_stage(name: str, value: Number | Sequence[Number], num_stages: int) -> tuple[Number, ...]:
    values = _broadcast(value, num_stages)
    _check_length(name, values, max(num_stages, 0), "stages")
    return values


def _broadcast(value: Number | Sequence[Number], count: int) -> tuple[Number, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * max(count, 0)
