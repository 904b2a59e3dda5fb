"""From a recording and a place for each unit: what every stage runs, receives and sends. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeloom.recording.ops import INPUT, Kind, Op, Recording, Value

Crossings = dict[int, tuple[Value, ...]]
"""Per other stage, the values that come from it or go to it, in order."""


@dataclass(frozen=True)
class StageFlow:
    """What one stage has to do with a micro-batch.

    Args:
        start: its first op of its own.
        end: where it stops.
        receives: per stage, the values that come from it.
        sends: per stage, the values that go to it.
        seeds: per later stage, the values whose gradients come back from it: of those that this stage sent, and of
            those that it received, and that a later stage received too.
        returns: per earlier stage, the values whose gradients go to it.
        keeps: per op, the outputs of this stage that are needed by name: sent, or held by memory that is written later.
    """

    start: int
    end: int
    receives: Crossings
    sends: Crossings
    seeds: Crossings
    returns: Crossings
    keeps: Mapping[int, tuple[int, ...]]

    # Every micro-batch asks for these several times.
    @cached_property
    def incoming(self) -> tuple[Value, ...]:
        """All values that come, by stage."""
        return tuple(value for stage in sorted(self.receives) for value in self.receives[stage])

    @cached_property
    def outgoing(self) -> tuple[Value, ...]:
        """All values that go, each once, in order."""
        return tuple(sorted({value for values in self.sends.values() for value in values}))


@dataclass(frozen=True, slots=True)
class Flow:
    """One recording, cut.

    Args:
        stage_of: per op its stage; None: every stage runs it.
        stages: what each does.
    """

    stage_of: tuple[int | None, ...]
    stages: tuple[StageFlow, ...]

    @property
    def forward_links(self) -> set[tuple[int, int]]:
        """The pairs of stages between which a value travels, that are no neighbours."""
        return {(s, to) for s, each in enumerate(self.stages) for to, v in each.sends.items() if v and to > s + 1}

    @property
    def backward_links(self) -> set[tuple[int, int]]:
        """The pairs of stages between which a gradient travels, that are no neighbours."""
        return {(s, to) for s, each in enumerate(self.stages) for to, v in each.returns.items() if v and to < s - 1}


def flow(recording: Recording, unit_stages: Sequence[int], num_stages: int) -> Flow:
    """Work out what crosses between stages.

    Args:
        recording: of a dry run.
        unit_stages: the stage of each call of a unit, in order; never descending.
        num_stages: how many there are.
    """
    stage_of = _stages_of(recording.ops, unit_stages)
    consumers = _consumers(recording, stage_of, num_stages)
    receives: list[dict[int, list[Value]]] = [defaultdict(list) for _ in range(num_stages)]
    sends: list[dict[int, list[Value]]] = [defaultdict(list) for _ in range(num_stages)]
    returns: list[dict[int, list[Value]]] = [defaultdict(list) for _ in range(num_stages)]
    seeds: list[dict[int, list[Value]]] = [defaultdict(list) for _ in range(num_stages)]
    for value in sorted(consumers):
        producer, stages = _producer(value, stage_of), sorted(consumers[value])
        for stage in stages:
            sends[producer][stage].append(value)
            receives[stage][producer].append(value)
        # The gradient goes from the latest consumer to the one before, and so on to the producer (contract 2).
        back = zip(reversed(stages), [*reversed(stages[:-1]), producer], strict=True)
        for later, earlier in back if recording.needs_grad(value) else ():
            returns[later][earlier].append(value)
            seeds[earlier][later].append(value)
    ends, keeps = _ends(recording.ops, stage_of, num_stages), _keeps(recording, consumers, stage_of, num_stages)
    flows = [
        StageFlow(
            *ends[s], _fixed(receives[s]), _fixed(sends[s]), _fixed(seeds[s]), _fixed(returns[s]), keeps[s]
        )
        for s in range(num_stages)
    ]  # fmt: skip
    return Flow(tuple(stage_of), tuple(flows))


def _keeps(
    recording: Recording, sent: Iterable[Value], stage_of: Sequence[int | None], num_stages: int
) -> list[dict[int, tuple[int, ...]]]:
    found: list[dict[int, tuple[int, ...]]] = [{} for _ in range(num_stages)]
    holders = {holder for op in recording.ops for holder in op.holders.values()}
    for value in sorted({*sent, *holders}):
        stage = None if value.op == INPUT else stage_of[value.op]
        if stage is not None:
            found[stage][value.op] = (*found[stage].get(value.op, ()), value.leaf)
    return found


def _stages_of(ops: Sequence[Op], unit_stages: Sequence[int]) -> list[int | None]:
    """Glue belongs to the stage whose unit ran last."""
    found: list[int | None] = []
    stages, now = iter(unit_stages), 0
    for op in ops:
        if op.kind is Kind.UNIT:
            now = next(stages)
        found.append(None if op.kind is Kind.EVERYWHERE else now)
    return found


def _producer(value: Value, stage_of: Sequence[int | None]) -> int:
    return 0 if value.op == INPUT else stage_of[value.op] or 0


def _consumers(recording: Recording, stage_of: Sequence[int | None], num_stages: int) -> dict[Value, set[int]]:
    """Per value the stages that use it, but the one that made it."""
    found: dict[Value, set[int]] = defaultdict(set)
    for op, stage in zip(recording.ops, stage_of, strict=True):
        if stage is not None:
            for value in op.uses:
                if _producer(value, stage_of) != stage:
                    found[value].add(stage)
    for value in recording.results:
        if _producer(value, stage_of) != num_stages - 1:
            found[value].add(num_stages - 1)
    return found


def _ends(ops: Sequence[Op], stage_of: Sequence[int | None], num_stages: int) -> list[tuple[int, int]]:
    """Per stage its first op, and where it stops: at an op of a later one, but not before what all stages write."""
    own = [[i for i, stage in enumerate(stage_of) if stage == s] for s in range(num_stages)]
    later = [min((i for i, stage in enumerate(stage_of) if stage is not None and stage > s), default=len(stage_of))
             for s in range(num_stages)]  # fmt: skip
    last = max((op.index + 1 for op in ops if op.is_state), default=0)
    return [(found[0] if found else end, max(end, last)) for found, end in zip(own, later, strict=True)]


def _fixed(found: dict[int, list[Value]]) -> Crossings:
    return {stage: tuple(values) for stage, values in sorted(found.items())}
