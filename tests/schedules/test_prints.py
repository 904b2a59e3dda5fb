"""Every program at 4 ranks × 8 micro-batches, as printed where its schedule is defined."""

import re
from pathlib import Path

import pytest

from pipeloom.ir import Schedule
from pipeloom.schedules import schedule


def printed() -> dict[str, list[str]]:
    """Per schedule and options, what each rank does."""
    text = (Path(__file__).parent / "prints_p4_m8.txt").read_text(encoding="utf-8")
    sections = re.findall(r"\[(.*)\]\n((?:.+\n)+)", text)
    return {head: rows.splitlines() for head, rows in sections}


PRINTED = printed()


def in_print(made: Schedule) -> list[str]:
    """Without the stage where a rank has one; micro-batches counted from 0 in each direction."""
    rows = [" ".join(made.texts(rank)) for rank in range(made.num_ranks)]
    if made.placement.opposed:
        half = -(-made.num_microbatches // 2)
        return [re.sub(r"(\d+[FBIW])(\d+)", lambda m: f"{m[1]}{int(m[2]) % half}", row) for row in rows]
    if made.num_stages == made.num_ranks:
        return [re.sub(r"\d+([FBIW])", r"\1", row) for row in rows]
    return rows


@pytest.mark.parametrize("head", PRINTED)
def test_programs_are_those_in_print(head):
    name, *options = head.split()
    given = {key: int(value) for key, value in (option.split("=") for option in options)}
    made = schedule(name, num_ranks=4, num_microbatches=8, **given)
    assert in_print(made) == PRINTED[head]


def test_all_prints_are_read():
    assert len(PRINTED) == 16
    assert {len(rows) for rows in PRINTED.values()} == {4}
