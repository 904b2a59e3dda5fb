"""A schedule: for every rank, its actions in order.

In torch a schedule is a running object: its constructor wants live stages, and a stage asks for the process
group. Here it is a frozen value for all ranks at once, which is verified, simulated, drawn and executed alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from pipeloom.errors import UnsupportedShape
from pipeloom.ir.action import ALL, LAST_KINDS, Action, Kind, Overlap, Pin
from pipeloom.ir.links import NO_LINKS, Links
from pipeloom.ir.placement import Placement

Program = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """A placement and one program per rank.

    Args:
        placement: which rank holds which stage.
        programs: ``programs[rank]`` is what that rank does, in order.
        num_microbatches: how many micro-batches one step has.
        is_forward_only: evaluation: no backward is due.
        name: for people; two schedules that do the same are equal under any name.
        links: which stages hand over values beside the chain.
        overlaps: pairs of actions that a rank runs as one; they stand next to each other.
        pins: forwards that use an older version of the weights than the newest, in a schedule that updates them.

    Raises:
        UnsupportedShape: the number of programs is not the number of ranks, there is no micro-batch, or a link names
            a stage that is not there.
    """

    placement: Placement
    programs: tuple[Program, ...]
    num_microbatches: int
    is_forward_only: bool = False
    name: str = field(default="custom", compare=False)
    links: Links = NO_LINKS
    overlaps: frozenset[Overlap] = frozenset()
    pins: frozenset[Pin] = frozenset()

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise UnsupportedShape(f"{self.num_microbatches} micro-batches were given; at least 1 is needed")
        if len(self.programs) != self.num_ranks:
            raise UnsupportedShape(
                f"{len(self.programs)} programs were given for a placement on {self.num_ranks} ranks; "
                "every rank needs one"
            )
        self.links.check_range(self.num_stages)

    @property
    def num_ranks(self) -> int:
        """How many ranks take part."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.placement.num_stages

    def program(self, rank: int) -> Program:
        """What ``rank`` does, in order."""
        return self.programs[rank]

    def replica_of(self, microbatch: int) -> int:
        """The replica that a micro-batch runs through: the first half of the batch goes through the first one."""
        return 0 if microbatch == ALL else self.placement.replica_of(microbatch, self.num_microbatches)

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """The rank that runs ``stage`` for a micro-batch."""
        if not self.placement.opposed:
            return self.placement.ranks[stage]
        return self.placement.rank_of(stage, self.replica_of(microbatch))

    def holds(self, rank: int, action: Action) -> bool:
        """Whether ``rank`` is one that does an action: what is done once for a stage is done where the stage is."""
        if action.kind.is_of_stage:
            return rank in self.placement.ranks_of(action.stage)
        return rank == self.rank_of(action.stage, action.microbatch)

    def __iter__(self) -> Iterator[Action]:
        for program in self.programs:
            yield from program

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(self.texts(rank))}" for rank in range(self.num_ranks))

    def __len__(self) -> int:
        return sum(len(program) for program in self.programs)

    def texts(self, rank: int) -> Iterator[str]:
        """The program of ``rank`` in words; what overlaps is one of them."""
        firsts = {overlap.first: overlap for overlap in self.overlaps}
        skipped = {overlap.second for overlap in self.overlaps}
        pins = {pin.forward: pin for pin in self.pins}
        return (
            str(firsts.get(action, pins.get(action, action))) for action in self.program(rank) if action not in skipped
        )

    @cached_property
    def actions(self) -> frozenset[Action]:
        """Every action of every rank."""
        return frozenset(self)

    @property
    def is_lowered(self) -> bool:
        """Whether transfers between ranks stand in the programs."""
        return any(action.kind.is_transfer for action in self)

    @cached_property
    def updates(self) -> tuple[int, ...]:
        """The micro-batches after which stages update their weights, ascending; none if no program does."""
        return tuple(sorted({action.microbatch for action in self if action.kind is Kind.UPDATE}))

    @cached_property
    def digest(self) -> str:
        """A hash of what is done, equal on every machine; ranks compare it before they run."""
        rows = (" ".join(map(str, program)) for program in self.programs)
        more = [str(self.links)] if self.links else []
        more += [str(self.placement.opposed)] if self.placement.opposed else []
        more += sorted(map(str, self.overlaps)) + sorted(map(str, self.pins))
        text = "\n".join((str(self.placement.ranks), str(self.num_microbatches), *rows, *more))
        return hashlib.sha256(text.encode()).hexdigest()

    def accumulation_order(self, stage: int) -> tuple[int, ...]:
        """The micro-batches in the order in which ``stage`` adds up their weight gradients.

        Each of two replicas adds up its own, and those of the second follow here those of the first.
        """
        programs = [self.program(rank) for rank in dict.fromkeys(self.placement.ranks_of(stage))]
        found = [a.microbatch for program in programs for a in program if a.stage == stage and a.kind in LAST_KINDS]
        return tuple(sorted(found, key=self.replica_of))

    def why_misplaced(self, rank: int, action: Action) -> str | None:
        """Why ``action`` can't stand in the program of ``rank``; None if it can."""
        if not 0 <= action.stage < self.num_stages:
            return f"{action} is of stage {action.stage}; there are {self.num_stages}"
        if action.kind.is_of_stage:
            if action.microbatch != ALL:
                return f"{action} is of micro-batch {action.microbatch}, but is done once for all of them"
        elif not 0 <= action.microbatch < self.num_microbatches:
            return f"{action} is of micro-batch {action.microbatch}; there are {self.num_microbatches}"
        if not self.holds(rank, action):
            return f"{action} stands on rank {rank}; {self._where(action)}"
        if self.is_forward_only and action.kind not in (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F):
            return f"{action} stands in a schedule of forwards only"
        if action.kind is Kind.UPDATE and self.placement.opposed:
            return f"{action} would update one of two copies of stage {action.stage}, and leave the other behind"
        if action.peer is not None and not self.links.has(action):
            return f"{action} skips stages, but no link of the schedule leads there"
        return None

    def _where(self, action: Action) -> str:
        if action.kind.is_of_stage or not self.placement.opposed:
            ranks = " and ".join(map(str, self.placement.ranks_of(action.stage)))
            return f"stage {action.stage} is on rank {ranks}"
        rank = self.rank_of(action.stage, action.microbatch)
        return f"stage {action.stage} of micro-batch {action.microbatch} is on rank {rank}"

    def with_programs(self, programs: Iterable[Iterable[Action]]) -> Schedule:
        """The same schedule with other programs: what a pass returns."""
        return replace(self, programs=tuple(tuple(program) for program in programs))

    def with_links(self, links: Links) -> Schedule:
        """The same programs for stages that also hand over values by ``links``; lower it after this, not before."""
        return replace(self, links=links)
