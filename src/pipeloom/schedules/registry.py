"""The schedules by name. A new one is a file beside this and a line in `GENERATORS`."""

from __future__ import annotations

from collections.abc import Callable

from pipeloom.errors import UnknownSchedule, UnsupportedShape, near
from pipeloom.ir import Schedule
from pipeloom.ir.counts import is_whole
from pipeloom.schedules.forward_only import forward_only as without_backward
from pipeloom.schedules.gpipe import gpipe
from pipeloom.schedules.one_f_one_b import one_f_one_b

Generator = Callable[[int, int], Schedule]

GENERATORS: dict[str, Generator] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def schedule(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    forward_only: bool = False,
) -> Schedule:
    """Make the schedule of that name.

    Args:
        name: a key of `GENERATORS`, in any case.
        num_ranks: how many ranks the pipeline has, at least 1.
        num_microbatches: how many micro-batches one step has, at least 1.
        stages_per_rank: 1 is all that any schedule here has.
        forward_only: leave the backwards out, for evaluation.

    Raises:
        UnknownSchedule: no schedule has that name; near names are offered.
        UnsupportedShape: the schedule does not exist for these counts.
    """
    generate = generator(name)
    for counted, count in (("ranks", num_ranks), ("micro-batches", num_microbatches)):
        if not is_whole(count):
            raise UnsupportedShape(f"{count!r} was given for the number of {counted}; a whole number is needed")
    if stages_per_rank != 1:
        raise UnsupportedShape(
            f"schedule {name!r} was asked for with {stages_per_rank} stages per rank; it holds exactly 1 on each",
            "leave the stages per rank at 1, or use as many ranks as stages",
        )
    made = generate(int(num_ranks), int(num_microbatches))
    return without_backward(made) if forward_only else made


def generator(name: str) -> Generator:
    """The generator of that name.

    Raises:
        UnknownSchedule: no schedule has that name; near names are offered.
    """
    found = GENERATORS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(GENERATORS)
        raise UnknownSchedule(f"schedule {name!r} is unknown; the known ones are {known}", near(str(name), GENERATORS))
    return found
