"""Measured figures, typed from their authors' logs; `tests/schedules` has the published ones of each schedule."""

import csv
from pathlib import Path

import pytest

from pipeloom.cost import Costs
from pipeloom.schedules import schedule
from pipeloom.sim import simulate

TABLES = Path(__file__).parent / "tables"


def rows(name: str) -> list[dict[str, str]]:
    with (TABLES / name).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


MEASURED = {row["name"]: row for row in rows("measured_1f1b_uneven_stages.csv")}


@pytest.mark.parametrize("name", MEASURED)
def test_measured_uneven_stages(name):
    """Eight GPUs of one host: no latency is known, so none is assumed, and the optimizer's part is not there.

    So the prediction must be short, and by less than 2 %.
    """
    row = MEASURED[name]
    forward_s, backward_s = (
        [float(us) / 1e6 for us in row[column].split()] for column in ("fwd_us_per_stage", "bwd_us_per_stage")
    )
    num_ranks = int(row["pp"])
    costs = Costs.uniform(num_ranks, forward_s=forward_s, input_grad_s=backward_s, weight_grad_s=0.0)
    made = schedule("1f1b", num_ranks=num_ranks, num_microbatches=int(row["microbatches"]))
    measured_s = float(row["iteration_ms_measured"]) / 1e3
    assert 0.98 * measured_s < simulate(made, costs).makespan_s < measured_s
