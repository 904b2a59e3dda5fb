"""Receives that are posted ahead of their use, as far as a rank has buffers for them.

`add_transfers` posts a receive as late as it can, because a posted receive takes up a buffer. A transport that copies
into a buffer which is already there can take a message while its rank computes, so with buffers to spare a receive is
better posted early. How many buffers a program needs is counted by `pipeloom.ir.slots`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from pipeloom.errors import UnsupportedShape
from pipeloom.ir import Action, Program, Schedule
from pipeloom.ir.counts import is_whole
from pipeloom.ir.slots import peak_receive_slots, receives_used_by


def post_receives_early(schedule: Schedule, num_slots: int) -> Schedule:
    """Post each receive of a rank as early as ``num_slots`` receive buffers allow.

    The receives of a rank keep their order, and so does each channel. No receive is posted later than before, and none
    blocks its rank where it is posted, so a schedule that runs to its end still does. The peak of posted and unused
    receives becomes ``num_slots`` at most; a rank whose program needs more as it is stays as it is.

    Args:
        schedule: with its transfers; without, nothing changes.
        num_slots: buffers of each rank, for one message each; at least 1.

    Raises:
        UnsupportedShape: ``num_slots`` is no whole number, or less than 1.
    """
    if not is_whole(num_slots) or num_slots < 1:
        raise UnsupportedShape(f"{num_slots!r} receive slots were given; a whole number of at least 1 is needed")
    needed = peak_receive_slots(schedule)
    return schedule.with_programs(
        program if needed[rank] > num_slots else _early(schedule, program, num_slots)
        for rank, program in enumerate(schedule.programs)
    )


def _early(schedule: Schedule, program: Program, num_slots: int) -> Iterator[Action]:
    """In the program's order of receives, the next one wherever a buffer is free; not within a pair that is closed."""
    receives = deque(action for action in program if action.kind.is_recv)
    num_free, closed = num_slots, {pair[1] for pair in pairwise(program) if pair in schedule.overlaps}
    for action in program:
        if action.kind.is_recv:
            continue
        while receives and num_free and action not in closed:
            num_free -= 1
            yield receives.popleft()
        yield action
        num_free += sum(1 for _ in receives_used_by(action, schedule))
    yield from receives  # of messages that nothing uses
