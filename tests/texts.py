"""Schedules written as text: one line per rank, in the notation of `pipeloom.ir.notation`."""

from pipeloom.ir import Links, Placement, Schedule
from pipeloom.ir.links import NO_LINKS
from pipeloom.ir.notation import format_program, parse_action


def schedule_of(
    text: str,
    *,
    ranks: tuple[int, ...] | None = None,
    num_microbatches: int = 1,
    is_forward_only: bool = False,
    links: Links = NO_LINKS,
) -> Schedule:
    """A schedule of the programs in ``text``, one line per rank; by default stage ``s`` is on rank ``s``."""
    programs = tuple(tuple(map(parse_action, line.split())) for line in text.strip().splitlines())
    placement = Placement(ranks if ranks is not None else tuple(range(len(programs))))
    return Schedule(placement, programs, num_microbatches, is_forward_only, links=links)


def text_of(schedule: Schedule) -> list[str]:
    """The programs as text, one per rank."""
    return [" ".join(format_program(program)) for program in schedule.programs]


def with_stage(stage: int, program: str) -> str:
    """``F0 B0`` as ``3F0 3B0``: the papers leave the stage out where each rank has one."""
    return " ".join(f"{stage}{action}" for action in program.split())


ZB_H1 = """
F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
"""
"""ZB-H1 (Qi et al., ICLR 2024, section 2) on 4 ranks with 8 micro-batches; its "B" is our I."""


def zb_h1() -> Schedule:
    """`ZB_H1` as a schedule."""
    lines = ZB_H1.strip().splitlines()
    return schedule_of("\n".join(with_stage(*line) for line in enumerate(lines)), num_microbatches=8)


INTERLEAVED = """
0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"""
"""Interleaved 1F1B (Narayanan et al., SC 2021, section 2.2) on 2 ranks with 2 stages each and 4 micro-batches."""


def interleaved() -> Schedule:
    """`INTERLEAVED` as a schedule: stages 0 and 2 on rank 0, stages 1 and 3 on rank 1."""
    return schedule_of(INTERLEAVED, ranks=(0, 1, 0, 1), num_microbatches=4)
