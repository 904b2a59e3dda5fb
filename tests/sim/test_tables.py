"""Published figures, typed from the papers or their authors' logs; the ``source`` column says which."""

import csv
from pathlib import Path

import pytest

from pipeloom.cost import Costs
from pipeloom.ir import Timeline
from pipeloom.schedules import schedule
from pipeloom.sim import simulate

TABLES = Path(__file__).parent / "tables"


def rows(name: str) -> list[dict[str, str]]:
    with (TABLES / name).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def by_shape(name: str) -> dict[str, dict[str, str]]:
    return {f"{row['model']}-m{row['m']}": row for row in rows(name)}


TIMES = by_shape("zero_bubble_table6_profiled_times.csv")
RATES = by_shape("zero_bubble_table5_bubble_rates.csv")
MEASURED = {row["name"]: row for row in rows("measured_1f1b_uneven_stages.csv")}
METRICS = {row["schedule"]: row for row in rows("schedules_p4_m8_metrics.csv")}


def profiled(row: dict[str, str]) -> Timeline:
    """Zero Bubble's letter B is our I, and its T_comm is latency that occupies nobody."""
    num_ranks, num_microbatches = int(row["p"]), int(row["m"])
    costs = Costs.uniform(
        num_ranks,
        forward_s=float(row["T_F_ms"]) / 1e3,
        input_grad_s=float(row["T_B_ms"]) / 1e3,
        weight_grad_s=float(row["T_W_ms"]) / 1e3,
        transfer_s=float(row["T_comm_ms"]) / 1e3,
    )
    return simulate(schedule("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches), costs)


@pytest.mark.parametrize("shape", TIMES)
def test_zero_bubble_table_5(shape):
    rate = profiled(TIMES[shape]).bubble_fraction_unsynchronised
    assert f"{rate:.4f}" == RATES[shape]["1F1B"]


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


@pytest.mark.parametrize("name", METRICS)
def test_unit_metrics(name):
    row = METRICS[name]
    made = schedule(name, num_ranks=int(row["p"]), num_microbatches=int(row["m"]))
    timeline = simulate(made, Costs.unit(made.num_stages))
    assert timeline.makespan_s == float(row["makespan"])
    assert timeline.longest_rank_span_s == float(row["zb_cost(longest rank span)"])
    assert timeline.busy_s == (float(row["busy_per_rank"]),) * made.num_ranks
    assert f"{timeline.bubble_fraction:.4f}" == row["bubble_by_makespan"]
    assert f"{timeline.bubble_fraction_unsynchronised:.4f}" == row["bubble_by_zb_cost"]


@pytest.mark.parametrize("name", METRICS)
def test_peaks(name):
    row = METRICS[name]
    made = schedule(name, num_ranks=int(row["p"]), num_microbatches=int(row["m"]))
    timeline = simulate(made, Costs.unit(made.num_stages))
    to_input_grad, to_weight_grad = (tuple(map(int, row[f"peak_chunks_F_to_{half}_per_rank"].split())) for half in "IW")
    assert timeline.peak_held_to_input_grad == to_input_grad
    assert timeline.peak_held_to_weight_grad == to_weight_grad
