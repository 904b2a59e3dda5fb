"""A table of lines per file and per room: growth should be seen at review, not found in a year.

python -m tools.lines
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tools.source import Source, read

# Lines of code: a docstring with its paper, drawing and errors must not be paid for out of the budget
# (docs/decisions/0008-budgets-count-code.md).
BUDGETS = {
    "errors.py": 120,
    "ir": 900,
    "schedules": 1_200,
    "passes": 600,
    "cost": 400,
    "sim": 400,
    "planning": 1_500,
    "standins": 1_000,
    "recording": 1_500,
    "splitting": 2_000,
    "outline": 500,
    "batch": 750,
    "chance": 150,
    "peers": 900,
    "halves": 500,
    "runtime": 1_900,
    "processes": 1_150,
    "parallel": 1_800,
    "archive": 600,
    "checkpoint": 700,
    "weights": 700,
    "train": 900,
    "launch": 400,
    "report": 700,
    "programs.py": 140,
    "asynchronous": 400,
    "ranks.py": 150,
    "assembly.py": 150,
    "whole.py": 150,
    "parity": 500,
    "pipeline.py": 300,
    "cli": 1_000,
    "testing": 500,
}


def room_code_lines(sources: Iterable[Source]) -> dict[str, int]:
    """Return the number of lines of code in each room."""
    totals: defaultdict[str, int] = defaultdict(int)
    for source in sources:
        totals[source.room] += source.num_code_lines
    return dict(totals)


def file_table(sources: Iterable[Source]) -> list[str]:
    """Return one row for each file: all lines, lines of code."""
    rows = [f"{source.num_lines:6}{source.num_code_lines:6}  {source.name}" for source in sources]
    return [" lines  code  file", *rows]


def room_table(sources: Iterable[Source]) -> list[str]:
    """Return one row for each room: lines of code, budget, and a mark where it is exceeded."""
    rows = (_room_row(room, num_lines) for room, num_lines in sorted(room_code_lines(sources).items()))
    return ["  code  budget  room", *rows]


def _room_row(room: str, num_lines: int) -> str:
    budget = BUDGETS.get(room)
    mark = "  over budget" if budget is not None and num_lines > budget else ""
    return f"{num_lines:6}{budget or '-':>8}  {room}{mark}"


def main() -> None:
    """Print both tables and the totals."""
    sources, tests = read(Path(), "src"), read(Path(), "tests")
    print("\n".join([*file_table(sources), "", *room_table(sources), ""]))
    for name, group in (("src", sources), ("tests", tests)):
        code = sum(source.num_code_lines for source in group)
        print(f"{name}: {sum(source.num_lines for source in group)} lines, {code} of them code")


if __name__ == "__main__":
    main()
