"""How many micro-batches a rank holds at most: two peaks, because a split backward frees memory twice.

Memory follows from the order of a program alone, never from its timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from pipeloom.ir.action import Action, Kind
from pipeloom.ir.schedule import Program, Schedule

_UNTIL_INPUT_GRAD = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT_GRAD: -1}
_UNTIL_WEIGHT_GRAD = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRAD: -1}


def peak_held_to_input_grad(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most micro-batches held between F and I (or B), summed over its stages."""
    return _peak_counts(schedule, _UNTIL_INPUT_GRAD)


def peak_held_to_weight_grad(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most micro-batches held between F and W (or B), summed over its stages."""
    return _peak_counts(schedule, _UNTIL_WEIGHT_GRAD)


class HeldBytes(Protocol):
    """What a micro-batch holds, in bytes, per stage; `pipeloom.cost.Costs` is one."""

    @property
    def bytes_held_to_input_grad(self) -> Sequence[int]:
        """From F (or R) until I."""

    @property
    def bytes_held_to_weight_grad(self) -> Sequence[int]:
        """What of it stays from I until W."""

    @property
    def bytes_held_to_recompute(self) -> Sequence[int]:
        """What a stage that recomputes holds from F until R: its input."""


def peak_activation_bytes(schedule: Schedule, held: HeldBytes) -> tuple[int, ...]:
    """Per rank, the most bytes of activations held at once, summed over its stages."""
    if schedule.is_forward_only:
        return (0,) * schedule.num_ranks
    bytes_in = bytes_held(schedule, held)
    return tuple(max(bytes_in(program), default=0) for program in schedule.programs)


def bytes_held(schedule: Schedule, held: HeldBytes) -> Callable[[Program], Iterator[int]]:
    """What gives, for a program with the actions of ``schedule``, the most bytes that are held during each of them.

    A forward that runs again holds its activations while it runs, and what R needs from then on.
    """
    to_recompute, to_input, to_weight = (
        held.bytes_held_to_recompute,
        held.bytes_held_to_input_grad,
        held.bytes_held_to_weight_grad,
    )
    recomputed = {(a.stage, a.microbatch) for a in schedule if a.kind is Kind.RECOMPUTE}
    changes = {}
    for stage in range(schedule.num_stages):
        changes[(Kind.FORWARD.code, stage)] = to_input[stage]
        changes[(Kind.RECOMPUTE.code, stage)] = to_input[stage] - to_recompute[stage]
        changes[(Kind.INPUT_GRAD.code, stage)] = to_weight[stage] - to_input[stage]
        changes[(Kind.WEIGHT_GRAD.code, stage)] = -to_weight[stage]
        changes[(Kind.BACKWARD.code, stage)] = -to_input[stage]

    def during(program: Program) -> Iterator[int]:
        total = 0
        for action in program:
            before, total = total, total + changes.get((action.kind.code, action.stage), 0)
            yield max(before, total)
            if action.kind is Kind.FORWARD and (action.stage, action.microbatch) in recomputed:
                total += to_recompute[action.stage] - to_input[action.stage]

    return during


def running_peaks(schedule: Schedule, change: Callable[[Action], int]) -> tuple[int, ...]:
    """Per rank, the largest running sum of ``change`` over its program, from 0 on."""
    return tuple(max(accumulate(map(change, program), initial=0)) for program in schedule.programs)


def _peak_counts(schedule: Schedule, steps: Mapping[Kind, int]) -> tuple[int, ...]:
    def change(action: Action) -> int:
        return steps.get(action.kind, 0)

    return _peaks_held(schedule, change)


def _peaks_held(schedule: Schedule, change: Callable[[Action], int]) -> tuple[int, ...]:
    """A forward-only schedule holds nothing: no backward will ask for it."""
    return (0,) * schedule.num_ranks if schedule.is_forward_only else running_peaks(schedule, change)
