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
from pipeloom.ir.action import Action, Kind
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

    Raises:
        UnsupportedShape: the number of programs is not the number of ranks, or there is no micro-batch.
    """

    placement: Placement
    programs: tuple[Program, ...]
    num_microbatches: int
    is_forward_only: bool = False
    name: str = field(default="custom", compare=False)

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise UnsupportedShape(f"{self.num_microbatches} micro-batches were given; at least 1 is needed")
        if len(self.programs) != self.num_ranks:
            raise UnsupportedShape(
                f"{len(self.programs)} programs were given for a placement on {self.num_ranks} ranks; "
                "every rank needs one"
            )

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

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        return self.placement.rank_of(stage)

    def __iter__(self) -> Iterator[Action]:
        for program in self.programs:
            yield from program

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.programs))

    def __len__(self) -> int:
        return sum(len(program) for program in self.programs)

    @cached_property
    def actions(self) -> frozenset[Action]:
        """Every action of every rank."""
        return frozenset(self)

    @property
    def is_lowered(self) -> bool:
        """Whether transfers between ranks stand in the programs."""
        return any(not action.kind.is_compute for action in self)

    @cached_property
    def digest(self) -> str:
        """A hash of what is done, equal on every machine; ranks compare it before they run."""
        rows = (" ".join(map(str, program)) for program in self.programs)
        text = "\n".join((str(self.placement.ranks), str(self.num_microbatches), *rows))
        return hashlib.sha256(text.encode()).hexdigest()

    def accumulation_order(self, stage: int) -> tuple[int, ...]:
        """The micro-batches in the order in which ``stage`` adds up their weight gradients."""
        kinds = (Kind.BACKWARD, Kind.WEIGHT_GRAD)
        program = self.program(self.rank_of(stage))
        return tuple(a.microbatch for a in program if a.stage == stage and a.kind in kinds)

    def why_misplaced(self, rank: int, action: Action) -> str | None:
        """Why ``action`` can't stand in the program of ``rank``; None if it can."""
        if not 0 <= action.stage < self.num_stages:
            return f"{action} is of stage {action.stage}; there are {self.num_stages}"
        if not 0 <= action.microbatch < self.num_microbatches:
            return f"{action} is of micro-batch {action.microbatch}; there are {self.num_microbatches}"
        if self.rank_of(action.stage) != rank:
            return f"{action} stands on rank {rank}; stage {action.stage} is on rank {self.rank_of(action.stage)}"
        if self.is_forward_only and action.kind not in (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F):
            return f"{action} stands in a schedule of forwards only"
        return None

    def with_programs(self, programs: Iterable[Iterable[Action]]) -> Schedule:
        """The same schedule with other programs: what a pass returns."""
        return replace(self, programs=tuple(tuple(program) for program in programs))
