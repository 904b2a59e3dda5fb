"""What PipeDream and its kin share: a pipeline that never drains, and updates weights while it runs.

Its micro-batches are those of many batches, one after another, and a stage updates its weights as soon as the
gradients of a batch are complete, while micro-batches of the next ones are on their way. Warm-up, steady phase and
cool-down are those of 1F1B, once for all batches, and so are bubble and activations. Which version of the weights a
micro-batch uses differs, and is what `pins` say.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.errors import UnsupportedShape
from pipeloom.ir import Action, Kind, Placement, Schedule
from pipeloom.ir.counts import is_whole
from pipeloom.schedules.phases import one_forward_one_backward
from pipeloom.schedules.shape import Shape, require


def updating(name: str, num_ranks: int, num_microbatches: int, microbatches_per_update: int) -> Schedule:
    """1F1B over all batches without a pause, with an update after the last backward of each.

    Raises:
        UnsupportedShape: there is no rank or micro-batch, or no whole number of micro-batches between updates.
    """
    require(name, Shape(num_ranks, num_microbatches))
    if not is_whole(microbatches_per_update) or microbatches_per_update < 1:
        raise UnsupportedShape(
            f"microbatches_per_update={microbatches_per_update!r} was given; a whole number of at least 1 is needed"
        )
    programs = (_program(rank, num_ranks, num_microbatches, int(microbatches_per_update)) for rank in range(num_ranks))
    return Schedule(Placement.single(num_ranks), tuple(map(tuple, programs)), num_microbatches, name=name)


def _program(rank: int, num_ranks: int, num_microbatches: int, microbatches_per_update: int) -> Iterator[Action]:
    works = [(rank, i) for i in range(num_microbatches)]
    for action in one_forward_one_backward(works, works, min(num_ranks - 1 - rank, num_microbatches)):
        yield action
        num_done = action.microbatch + 1
        is_last = num_done % microbatches_per_update == 0 or num_done == num_microbatches
        if action.kind is Kind.BACKWARD and is_last:
            yield Action(Kind.UPDATE, rank, action.microbatch)
