"""Programs from timetables: each action has a slot, and a rank does what it has in the order of slots."""

from __future__ import annotations

from collections.abc import Iterable

from pipeloom.ir import Action, Kind, Program

Slot = tuple[int, int, int]
"""When, which stage, which micro-batch."""


def in_order_of_slots(forwards: Iterable[Slot], backwards: Iterable[Slot]) -> Program:
    """A rank's program; no two of its actions may have the same slot."""
    timetable = [(slot, Action(Kind.FORWARD, stage, i)) for slot, stage, i in forwards]
    timetable += [(slot, Action(Kind.BACKWARD, stage, i)) for slot, stage, i in backwards]
    return tuple(action for _, action in sorted(timetable, key=lambda entry: entry[0]))
