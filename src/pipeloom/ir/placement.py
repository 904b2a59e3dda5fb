"""Which rank holds which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeloom.errors import UnsupportedShape


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank of every stage, in model order.

    Args:
        ranks: ``ranks[stage]`` is the rank that holds ``stage``; every rank from 0 on holds at least one.

    Raises:
        UnsupportedShape: there is no stage, a rank is negative, or one between 0 and the largest holds no stage.
    """

    ranks: tuple[int, ...]

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

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Stage ``s`` on rank ``s mod num_ranks``, as Megatron places its model chunks."""
        for name, count in (("ranks", num_ranks), ("stages per rank", stages_per_rank)):
            if count < 1:
                raise UnsupportedShape(f"{count} {name} were given; at least 1 is needed")
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def single(cls, num_ranks: int) -> Placement:
        """One stage per rank: stage ``s`` on rank ``s``."""
        return cls.loop(num_ranks)

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

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        return self.ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in model order."""
        return tuple(stage for stage, holder in enumerate(self.ranks) if holder == rank)
