"""Pairs that overlap, with no transfer between their two actions.

Lowered, the first of a pair sends what it made before the second begins: right where a rank runs one after the other.
A rank that runs both at once has to have what both need before they begin, and sends what they made when both are
done.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir import Action, Program, Schedule


def close_pairs(schedule: Schedule) -> Schedule:
    """Post what is received between the two of a pair before it, and send what is sent there after it.

    The order of sends and that of receives stay. What the second waits for may need what the first sends, if the
    schedule counts on one after the other; then the result can't run, and `pipeloom.verify` says so.

    Args:
        schedule: with its transfers; without, nothing changes.
    """
    second_of = dict(schedule.overlaps)
    return schedule.with_programs(_closed(program, second_of) for program in schedule.programs)


def _closed(program: Program, second_of: dict[Action, Action]) -> Iterator[Action]:
    position_of = {action: position for position, action in enumerate(program)}
    position = 0
    while position < len(program):
        action = program[position]
        end = position_of.get(second_of.get(action, action), position)
        between = program[position + 1 : end]
        yield from (each for each in between if each.kind.is_recv)
        yield action
        yield from program[end : end + 1] if end > position else ()
        yield from (each for each in between if not each.kind.is_recv)
        position = max(position, end) + 1
