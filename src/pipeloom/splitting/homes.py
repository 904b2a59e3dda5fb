"""Which stage runs which call of a unit, also where inputs take another way than the first ones. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from pipeloom.recording.refusals import called_again

Call = tuple[str, int]
"""A unit's name, and which call of it within one forward."""


def stages_of(calls: Sequence[Call], first: Sequence[Call], decided: Mapping[Call, int]) -> list[int]:
    """The stage of each call, never descending.

    Args:
        calls: in order.
        first: those of the inputs by which the model was cut.
        decided: their stages, and those of units that were not called then.

    Raises:
        SplitError: a unit is called after a stage has begun that is later than all that have it.
    """
    if list(calls) == list(first):
        return [decided[call] for call in calls]
    homes: dict[str, set[int]] = defaultdict(set)
    for (name, _), stage in decided.items():
        homes[name].add(stage)
    stages, now = [], 0
    for name, _ in calls:
        later = [stage for stage in homes.get(name, {now}) if stage >= now]
        if not later:
            raise called_again(name, max(homes[name]), now)
        now = min(later)
        stages.append(now)
    return stages
