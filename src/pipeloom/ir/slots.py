"""How many receive buffers a rank needs: by lifetime, from the post of a receive until its consumer starts.

torch keeps one buffer per micro-batch and direction (128 for 1F1B with 64 micro-batches). A program says how
many are ever live at once; for 1F1B lowered by `pipeloom.passes.add_transfers` that is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeloom.ir.action import Action
from pipeloom.ir.peaks import running_peaks
from pipeloom.ir.relations import other_stage, takes
from pipeloom.ir.schedule import Schedule


def receives_used_by(action: Action, schedule: Schedule) -> Iterator[Action]:
    """The receives whose values ``action`` consumes."""
    return (source for source in takes(action, schedule) if source.kind.is_recv)


def peak_receive_slots(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most receives that are posted and not yet consumed at once."""

    def change(action: Action) -> int:
        return 1 if action.kind.is_recv else -sum(1 for _ in receives_used_by(action, schedule))

    return running_peaks(schedule, change)


def peak_receive_bytes(schedule: Schedule, boundary_bytes: Sequence[int]) -> tuple[int, ...]:
    """Per rank, the most bytes of receives that are posted and not yet consumed at once.

    Args:
        schedule: with its transfers.
        boundary_bytes: size of a message between stages ``i`` and ``i + 1``, both ways, as in `pipeloom.cost.Costs`;
            what skips stages is as large as all that it skips.
    """

    def size(receive: Action) -> int:
        ends = receive.stage, other_stage(receive)
        return sum(boundary_bytes[min(ends) : max(ends)])

    def change(action: Action) -> int:
        return size(action) if action.kind.is_recv else -sum(map(size, receives_used_by(action, schedule)))

    return running_peaks(schedule, change)
