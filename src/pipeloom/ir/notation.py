"""Schedules as text, in both directions; the CSV is that of torch.distributed.pipelining.

torch's own parser is not anchored, so ``2F0xyz`` reads as ``2F0`` there. Here a text is an action as a whole
or not at all, and ``parse(format(schedule)) == schedule``.

A pair of actions that a rank runs as one is ``(3F7;4B2)OVERLAP_F_B``, as torch writes it.

torch's CSV has no word for a transfer that skips stages. Here it is ``0SEND_F3>2`` (to stage 2) with ``2RECV_F3<0``,
and the CSV of a schedule that has any is one that torch doesn't read. Nor has it one for an update of
weights, ``2U5``, or for a forward that uses version 3 of them, ``2F5@3``.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

from pipeloom.errors import NotationError
from pipeloom.ir.action import ALL, BACKWARD_KINDS, STAGE_KINDS, Action, Kind, Overlap, Pin
from pipeloom.ir.links import Links
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule

_KINDS = {kind.text: kind for kind in Kind}
# Seven digits: a number that nobody means would otherwise be taken for a count, and fill the memory.
_KIND = "|".join(sorted(_KINDS, key=len, reverse=True))
_ACTION = re.compile(rf"(\d{{1,7}})({_KIND})(\d{{0,7}})(?:([<>])(\d{{1,7}}))?", re.ASCII)
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B", re.ASCII)
_PINNED = re.compile(r"(\d{1,7}F\d{1,7})@(\d{1,7})", re.ASCII)


def parse_action(text: str) -> Action:
    """Read ``stage kind microbatch``, as in ``3F0`` or ``1RECV_B7``; and the peer of a transfer that skips stages.

    ``2UNSHARD``, ``2RESHARD`` and ``2REDUCE_GRAD`` are of all micro-batches, and name none.

    Raises:
        NotationError: the text as a whole is no action.
    """
    match = _ACTION.fullmatch(text)
    if match is None or match[4] not in (None, _KINDS[match[2]].mark) or bool(match[3]) is _is_of_stage(match[2]):
        raise NotationError(
            f"{text!r} is not an action: a stage, a kind and a micro-batch are needed, as in 3F0 or 1RECV_B7",
            f"the kinds are {' '.join(_KINDS)}",
        )
    stage, kind, microbatch, _, peer = match.groups()
    return Action(_KINDS[kind], int(stage), int(microbatch or ALL), None if peer is None else int(peer))


def _is_of_stage(kind: str) -> bool:
    return _KINDS[kind] in STAGE_KINDS


def format_program(program: Iterable[Action], overlaps: Iterable[Overlap] = (), pins: Iterable[Pin] = ()) -> list[str]:
    """A rank's program as texts, one for each action, or for each pair that overlaps.

    A pair is one word, so what is received between its two actions is written before it, and what is sent after it.
    """
    second_of, texts, program = dict(overlaps), list[str](), list(program)
    pinned = {pin.forward: pin for pin in pins}
    while program:
        action = program.pop(0)
        if action not in second_of:
            texts.append(str(pinned.get(action, action)))
            continue
        end = program.index(second_of[action])
        between, program = program[:end], program[end + 1 :]
        texts += [str(each) for each in between if each.kind.is_recv]
        first, second = (pinned.get(each, each) for each in (action, second_of[action]))
        texts.append(f"({first};{second})OVERLAP_F_B")
        texts += [str(each) for each in between if not each.kind.is_recv]
    return texts


def format_csv(schedule: Schedule) -> str:
    """Write the CSV of torch.distributed.pipelining: a row per rank, a cell per action.

    A lowered schedule gives torch's ``compute_comms`` form, another one its ``compute_only`` form. Transfers that skip
    stages, and updates of weights, are written in our notation, which torch doesn't read.
    """
    text = io.StringIO()
    csv.writer(text).writerows(
        format_program(program, schedule.overlaps, schedule.pins) for program in schedule.programs
    )
    return text.getvalue()


def parse_csv(text: str, *, name: str = "custom") -> Schedule:
    """Read that CSV. Empty cells (torch's idle slots) are skipped.

    A stage that stands in two rows belongs to two replicas (`Placement.bidirectional`): the first half of the
    micro-batches runs through one of them, the others through the other.

    The links of the schedule are those over which its transfers go. A link without one, between stages of a rank or
    in a schedule without transfers, doesn't stand in the text: `Schedule.with_links` gives it back.

    Raises:
        NotationError: a cell is no action, a stage stands on two ranks, a stage is missing, or there is nothing.
        UnsupportedShape: a row above the last one is empty, so its rank would hold no stage; or a transfer names a
            stage that it doesn't skip to.
    """
    rows = list(csv.reader(io.StringIO(text)))
    pins: set[Pin] = set()
    cells = [[_parse_cell(cell, pins) for cell in map(str.strip, row) if cell] for row in rows]
    overlaps = frozenset(Overlap(*each) for row in cells for each in row if len(each) == 2)
    programs = [[action for each in row for action in each] for row in cells]
    while programs and not programs[-1]:
        programs.pop()
    if not any(programs):
        raise NotationError("the text holds no action; a row of actions per rank is needed, as in 0F0,0B0")
    actions = [action for program in programs for action in program]
    return Schedule(
        placement=_placement(programs, 1 + max(action.microbatch for action in actions)),
        programs=tuple(map(tuple, programs)),
        num_microbatches=1 + max(action.microbatch for action in actions),
        is_forward_only=not any(action.kind in BACKWARD_KINDS for action in actions),
        name=name,
        links=Links.of(actions),
        overlaps=overlaps,
        pins=frozenset(pins),
    )


def _parse_cell(cell: str, pins: set[Pin]) -> tuple[Action, ...]:
    """The action or the pair of a cell; what a forward is pinned to joins ``pins``."""
    match = _OVERLAP.fullmatch(cell)
    texts = (cell,) if match is None else (match[1], match[2])
    return tuple(_parse_pinned(text, pins) for text in texts)


def _parse_pinned(text: str, pins: set[Pin]) -> Action:
    match = _PINNED.fullmatch(text)
    if match is None:
        return parse_action(text)
    pin = Pin(parse_action(match[1]), int(match[2]))
    pins.add(pin)
    return pin.forward


def _placement(programs: list[list[Action]], num_microbatches: int) -> Placement:
    """Which rank holds which stage, read off the rows; of each replica, if there are two."""
    rows: dict[int, set[int]] = {}
    for rank, program in enumerate(programs):
        for action in program:
            rows.setdefault(action.stage, set()).add(rank)
    missing = next(stage for stage in range(len(rows) + 1) if stage not in rows)
    if missing < max(rows):
        raise NotationError(f"stage {missing} has no action, but stage {max(rows)} has; none may be missing")
    has_two = all(len(each) == 2 for each in rows.values()) and num_microbatches > 1
    first: dict[int, int] = {}
    second: dict[int, int] = {}
    for rank, program in enumerate(programs):
        for action in program:
            if action.kind in STAGE_KINDS:
                continue
            holder = second if has_two and 2 * action.microbatch >= num_microbatches else first
            if holder.setdefault(action.stage, rank) != rank:
                raise NotationError(
                    f"{action} stands in row {rank}, but stage {action.stage} was seen in row "
                    f"{holder[action.stage]}; a stage belongs to one rank"
                )
    stages = range(len(rows))
    if has_two and not (len(first) == len(second) == len(rows)):
        lost = next(stage for stage in stages if stage not in first or stage not in second)
        raise NotationError(f"stage {lost} stands in two rows, but one half of the micro-batches does nothing there")
    return Placement(tuple(first[stage] for stage in stages), tuple(second[stage] for stage in stages if second))
