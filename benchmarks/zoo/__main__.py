"""The table of docs/zoo.md: thirty real models, what Pipeloom makes of them and what torch's `pipeline()` does.

    .venv-zoo/bin/python -m benchmarks.zoo [--models NAME ...] [--torch FILE] [--json]

``make test-zoo`` makes the environment. ``--torch`` takes the lines of
``python -m benchmarks.zoo.torch_pipelining --json`` instead of measuring them again, which takes ten minutes.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.zoo import ours
from benchmarks.zoo.torch_pipelining import installed, measure, verdict
from tests.zoo import models

STAGES = (2, 3, 4)
HEADS = ("model", "units", "glue", "values that cross", "s to split", "Pipeloom", "torch")

Row = dict[str, Any]


def joined(cells: Iterable[str]) -> str:
    """One cell for all numbers of stages: once if they agree, else each."""
    each = list(cells)
    return each[0] if len(set(each)) == 1 else " · ".join(each)


def judged(row: Row, errors: list[str]) -> str:
    """A row in a few words, with the number of its error, which is noted if it is a new one."""
    if "error" not in row:
        return verdict(row)
    if row["error"] not in errors:
        errors.append(row["error"])
    return f"{verdict(row)} ({errors.index(row['error']) + 1})"


def line(name: str, own: list[Row], torchs: list[Row], errors: list[str]) -> Iterator[str]:
    """The cells of a model; the time is that of the most stages."""
    yield name
    for key in ("units", "glue", "crossing"):
        yield joined(str(row.get(key, "–")) for row in own)
    yield f"{own[-1]['split_s']:.2f}" if "split_s" in own[-1] else "–"
    for rows in (own, torchs):
        yield joined(judged(row, errors) for row in rows) if rows else "–"


def table(own: list[Row], torchs: list[Row]) -> str:
    """Markdown, a line for each model; cells with dots are for two, three and four stages; below it the errors."""
    lines, errors = [list(HEADS), ["---"] * len(HEADS)], list[str]()
    for name in dict.fromkeys(row["model"] for row in own):
        of_model = ([row for row in rows if row["model"] == name] for rows in (own, torchs))
        lines.append(list(line(name, *of_model, errors)))
    notes = [f"{number}. `{error}`" for number, error in enumerate(errors, 1)]
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), *([""] if notes else []), *notes])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The table of docs/zoo.md.")
    parser.add_argument("--models", nargs="+", choices=models.NAMES, default=list(models.NAMES), metavar="NAME")
    parser.add_argument("--torch", type=Path, metavar="FILE", help="rows about torch that were measured before")
    parser.add_argument("--json", action="store_true", help="every figure, on one line for each row")
    options = parser.parse_args()
    names = installed(options.models)
    # torch's part first: it forks, which has to come before this process uses autograd.
    torchs = list(map(json.loads, options.torch.read_text().splitlines())) if options.torch else list(measure(names))
    warnings.simplefilter("ignore")
    own = [ours.step(name, num_stages) for name in names for num_stages in STAGES]
    if options.json:
        print("\n".join(json.dumps({"ours": row}) for row in own))
        print("\n".join(json.dumps({"torch": row}) for row in torchs))
    else:
        print(table(own, torchs))


if __name__ == "__main__":
    main()
