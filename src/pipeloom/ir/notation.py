"""Schedules as text, in both directions; the CSV is that of torch.distributed.pipelining.

torch's own parser is not anchored, so ``2F0xyz`` reads as ``2F0`` there. Here a text is an action as a whole
or not at all, and ``parse(format(schedule)) == schedule``.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

from pipeloom.errors import NotationError
from pipeloom.ir.action import Action, Kind
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule

_KINDS = {kind.text: kind for kind in Kind}
# Seven digits: a number that nobody means would otherwise be taken for a count, and fill the memory.
_ACTION = re.compile(rf"(\d{{1,7}})({'|'.join(sorted(_KINDS, key=len, reverse=True))})(\d{{1,7}})", re.ASCII)
_SHARDING = re.compile(r"\d+(?:UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)
_BACKWARD = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


def parse_action(text: str) -> Action:
    """Read ``stage kind microbatch``, as in ``3F0`` or ``1RECV_B7``.

    Raises:
        NotationError: the text as a whole is no action.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise NotationError(
            f"{text!r} is not an action: a stage, a kind and a micro-batch are needed, as in 3F0 or 1RECV_B7",
            f"the kinds are {' '.join(_KINDS)}",
        )
    stage, kind, microbatch = match.groups()
    return Action(_KINDS[kind], int(stage), int(microbatch))


def format_program(program: Iterable[Action]) -> list[str]:
    """A rank's program as texts."""
    return [str(action) for action in program]


def format_csv(schedule: Schedule) -> str:
    """Write the CSV of torch.distributed.pipelining: a row per rank, a cell per action.

    A lowered schedule gives torch's ``compute_comms`` form, another one its ``compute_only`` form.
    """
    text = io.StringIO()
    csv.writer(text).writerows(format_program(program) for program in schedule.programs)
    return text.getvalue()


def parse_csv(text: str, *, name: str = "custom") -> Schedule:
    """Read that CSV. Empty cells (torch's idle slots) are skipped.

    torch's lowered tables also hold ``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD``. They move sharded parameters
    and do nothing for parameters that are not sharded, so they are left out.

    Raises:
        NotationError: a cell is no action, a stage stands on two ranks, a stage is missing, or there is nothing.
        UnsupportedShape: a row above the last one is empty, so its rank would hold no stage.
    """
    rows = list(csv.reader(io.StringIO(text)))
    programs = [[parse_action(cell) for cell in map(str.strip, row) if _is_read(cell)] for row in rows]
    while programs and not programs[-1]:
        programs.pop()
    if not any(programs):
        raise NotationError("the text holds no action; a row of actions per rank is needed, as in 0F0,0B0")
    actions = [action for program in programs for action in program]
    return Schedule(
        placement=_placement(programs),
        programs=tuple(map(tuple, programs)),
        num_microbatches=1 + max(action.microbatch for action in actions),
        is_forward_only=not any(action.kind in _BACKWARD for action in actions),
        name=name,
    )


def _is_read(cell: str) -> bool:
    return bool(cell) and _SHARDING.fullmatch(cell) is None


def _placement(programs: list[list[Action]]) -> Placement:
    """Which rank holds which stage, read off the rows."""
    holder: dict[int, int] = {}
    for rank, program in enumerate(programs):
        for action in program:
            if holder.setdefault(action.stage, rank) != rank:
                raise NotationError(
                    f"{action} stands in row {rank}, but stage {action.stage} was seen in row "
                    f"{holder[action.stage]}; a stage belongs to one rank"
                )
    missing = next(stage for stage in range(len(holder) + 1) if stage not in holder)
    if missing < max(holder):
        raise NotationError(f"stage {missing} has no action, but stage {max(holder)} has; none may be missing")
    return Placement(tuple(holder[stage] for stage in range(len(holder))))
