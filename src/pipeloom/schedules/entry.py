"""What the registry knows of a schedule; each generator's file ends with its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeloom.ir import Schedule
from pipeloom.schedules.formulas import Formulas, Times
from pipeloom.schedules.shape import Demand, Shape

Generator = Callable[..., Schedule]


@dataclass(frozen=True)
class Entry:
    """One schedule.

    Args:
        name: its name here.
        generate: a function of the numbers of ranks and of micro-batches, and of what it `takes`.
        formulas: what its paper promises.
        takes: keywords of ``generate`` beside these: ``stages_per_rank``, ``group_size``, ``costs``,
            ``microbatches_per_update``.
        stages_per_rank: what it has if nobody asks for a number.
        demands: what it needs of a shape.
        aliases: what others call it; case, blanks, ``-`` and ``_`` do not matter, nor a leading "Schedule".
        microbatches_per_batch: how many a pipeline cuts a batch into if nobody says; None: one per stage.
        has_recompute: every micro-batch runs through each stage's forward twice.
    """

    name: str
    generate: Generator
    formulas: Formulas = field(default_factory=Formulas)
    takes: frozenset[str] = frozenset()
    stages_per_rank: int = 1
    demands: tuple[Demand, ...] = ()
    aliases: tuple[str, ...] = ()
    microbatches_per_batch: int | None = None
    has_recompute: bool = False

    @property
    def is_asynchronous(self) -> bool:
        """Whether its programs update weights; its micro-batches are then those of many batches."""
        return "microbatches_per_update" in self.takes

    def busy_s(self, shape: Shape, times: Times) -> float:
        """Seconds that a rank computes in a step."""
        again_s = times.forward_s if self.has_recompute else 0.0
        return shape.num_microbatches * shape.stages_per_rank * (times.step_s + again_s)

    def made(self, shape: Shape, options: dict[str, object]) -> Schedule:
        """The schedule of a shape that meets the demands."""
        given = dict(options)
        if "stages_per_rank" in self.takes:
            given["stages_per_rank"] = shape.stages_per_rank
        return self.generate(shape.num_ranks, shape.num_microbatches, **given)
