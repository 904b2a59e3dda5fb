"""Which version of its stage's weights each micro-batch uses, and how many versions a rank holds.

Version k of a stage's weights is what they are after k updates (U). A forward uses the newest version that is there
when it comes, unless the schedule pins it to an older one; R, B, I and W of a micro-batch use what its forward used.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from pipeloom.ir.action import LAST_KINDS, Kind
from pipeloom.ir.schedule import Program, Schedule


def used_versions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Per stage and micro-batch, the version that its forward uses: all 0 where no program updates weights."""
    pinned = {pin.forward: pin.version for pin in schedule.pins}
    found: dict[tuple[int, int], int] = {}
    for program in schedule.programs:
        newest: Counter[int] = Counter()
        for action in program:
            if action.kind is Kind.FORWARD:
                found[action.stage, action.microbatch] = pinned.get(action, newest[action.stage])
            elif action.kind is Kind.UPDATE:
                newest[action.stage] += 1
    return found


def peak_versions_held(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most versions of weights held at once, summed over its stages.

    A version is held while it is the newest, and while a micro-batch that uses it has not had its backward.
    """
    if not schedule.updates:
        return tuple(len(schedule.placement.stages_of(rank)) for rank in range(schedule.num_ranks))
    used = used_versions(schedule)
    users: dict[int, Counter[int]] = defaultdict(Counter)
    for (stage, _), version in used.items():
        users[stage][version] += 1
    stages = [schedule.placement.stages_of(rank) for rank in range(schedule.num_ranks)]
    return tuple(
        _peak(program, {stage: users[stage] for stage in own}, used)
        for program, own in zip(schedule.programs, stages, strict=True)
    )


def _peak(program: Program, users: dict[int, Counter[int]], used: dict[tuple[int, int], int]) -> int:
    newest = dict.fromkeys(users, 0)
    older = dict.fromkeys(users, 0)  # per stage, versions before the newest that somebody will use
    peak = len(users)
    for action in program:
        stage = action.stage
        if action.kind in LAST_KINDS:
            version = used[stage, action.microbatch]
            users[stage][version] -= 1
            older[stage] -= not users[stage][version] and version < newest[stage]
        elif action.kind is Kind.UPDATE:
            older[stage] += users[stage][newest[stage]] > 0
            newest[stage] += 1
            peak = max(peak, len(users) + sum(older.values()))
    return peak
