"""Which rank holds which stage.

Schedules that send micro-batches from both ends (Chimera, DualPipe) have two replicas of the whole model on the same
ranks, opposed to each other: each stage stands on two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeloom.errors import UnsupportedShape


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank of every stage, in model order.

    Args:
        ranks: ``ranks[stage]`` is the rank that holds ``stage``; every rank from 0 on holds at least one.
        opposed: the same for a second replica; () if there is only one.

    Raises:
        UnsupportedShape: there is no stage, a rank is negative, or one between 0 and the largest holds no stage.
    """

    ranks: tuple[int, ...]
    opposed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks:
            raise UnsupportedShape("a placement of no stages was given; at least one stage is needed")
        if min(self.ranks) < 0:
            raise UnsupportedShape(f"placement {list(self.ranks)} names rank {min(self.ranks)}; ranks count from 0")
        idle = sorted(set(range(max(self.ranks) + 1)) ^ set(self.ranks))
        if idle:
            raise UnsupportedShape(
                f"placement {list(self.ranks)} leaves rank {idle[0]} without a stage; every rank must hold at least one"
            )
        if self.opposed and (sorted(self.opposed) != sorted(self.ranks)):
            raise UnsupportedShape(
                f"a second replica on ranks {list(self.opposed)} was given beside {list(self.ranks)}; it has the same "
                "stages, on the same ranks, in another order"
            )

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Stage ``s`` on rank ``s mod num_ranks``, as Megatron places its model chunks."""
        _check_positive(num_ranks, "ranks")
        _check_positive(stages_per_rank, "stages per rank")
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def single(cls, num_ranks: int) -> Placement:
        """One stage per rank: stage ``s`` on rank ``s``."""
        return cls.loop(num_ranks)

    @classmethod
    def v(cls, num_ranks: int) -> Placement:
        """Two stages per rank, there and back: the first and the last stage on rank 0 (ZB-V, DualPipeV)."""
        return cls.wave(num_ranks, 1)

    @classmethod
    def wave(cls, num_ranks: int, num_waves: int) -> Placement:
        """There and back ``num_waves`` times, two stages per rank and wave (Hanayo)."""
        _check_positive(num_ranks, "ranks")
        _check_positive(num_waves, "waves")
        return cls((*range(num_ranks), *reversed(range(num_ranks))) * num_waves)

    @classmethod
    def bidirectional(cls, num_ranks: int) -> Placement:
        """Two replicas with one stage per rank each, the second from the last rank to the first."""
        _check_positive(num_ranks, "ranks")
        return cls(tuple(range(num_ranks)), tuple(reversed(range(num_ranks))))

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Placement:
        """A placement from any sequence: the rank of each stage."""
        return cls(tuple(ranks))

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """How many ranks hold them."""
        return max(self.ranks) + 1

    @property
    def num_replicas(self) -> int:
        """How many times the whole model stands on these ranks."""
        return 2 if self.opposed else 1

    def rank_of(self, stage: int, replica: int = 0) -> int:
        """The rank that holds ``stage`` of a replica."""
        return self.opposed[stage] if replica else self.ranks[stage]

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold ``stage``, one for each replica."""
        return (self.ranks[stage], self.opposed[stage]) if self.opposed else (self.ranks[stage],)

    def stages_of(self, rank: int, replica: int | None = None) -> tuple[int, ...]:
        """The stages that ``rank`` holds, of one replica or of any, in model order."""
        if replica is not None:
            return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage, replica) == rank)
        return tuple(stage for stage in range(self.num_stages) if rank in self.ranks_of(stage))

    def replica_of(self, microbatch: int, num_microbatches: int) -> int:
        """The replica that a micro-batch runs through: the first half of the batch goes through the first one."""
        return int(2 * microbatch >= num_microbatches) if self.opposed else 0


def _check_positive(count: int, name: str) -> None:
    if count < 1:
        raise UnsupportedShape(f"{count} {name} were given; at least 1 is needed")
