"""How many receive buffers a rank needs: by lifetime, from the post of a receive until its consumer starts.

torch keeps one buffer per micro-batch and direction (128 for 1F1B with 64 micro-batches). A program says how
many are ever live at once; for 1F1B lowered by `pipeloom.passes.add_transfers` that is one.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir.action import Action
from pipeloom.ir.peaks import running_peaks
from pipeloom.ir.relations import takes
from pipeloom.ir.schedule import Schedule


def receives_used_by(action: Action, schedule: Schedule) -> Iterator[Action]:
    """The receives whose values ``action`` consumes."""
    return (source for source in takes(action, schedule) if source.kind.is_recv)


def peak_receive_slots(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most receives that are posted and not yet consumed at once."""

    def change(action: Action) -> int:
        return 1 if action.kind.is_recv else -sum(1 for _ in receives_used_by(action, schedule))

    return running_peaks(schedule, change)
