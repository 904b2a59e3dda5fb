"""The tables that torch 2.13 prints, read by our notation: an implementation that we did not write."""

import csv
from pathlib import Path

import pytest

from pipeloom.cost import Costs
from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.notation import format_csv, parse_csv
from pipeloom.passes import add_transfers
from pipeloom.schedules import gpipe, one_f_one_b
from pipeloom.sim import simulate

visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

METRICS = Path(__file__).parents[1] / "sim" / "tables" / "torch_tables_p4_m8_metrics.csv"
SHAPES = [(2, 4), (3, 5), (4, 8), (8, 16)]

by_shape = pytest.mark.parametrize(("num_ranks", "num_microbatches"), SHAPES)


def torch_table(name, num_ranks, num_microbatches, **options) -> Schedule:
    """torch's table through its own text; it writes idle slots as empty cells."""
    table = visualizer.get_schedule_ops(name, num_ranks, num_microbatches, **options)
    return parse_csv("\n".join(",".join("" if a is None else str(a) for a in row) for row in table))


@by_shape
def test_gpipe_is_that_of_torch(num_ranks, num_microbatches):
    assert torch_table("GPipe", num_ranks, num_microbatches) == gpipe(num_ranks, num_microbatches)


@by_shape
def test_1f1b_is_that_of_torch_but_for_its_last_rank(num_ranks, num_microbatches):
    """torch's last rank is off by one: it begins with micro-batch 1 and ends with one that does not exist."""
    theirs = torch_table("1F1B", num_ranks, num_microbatches)
    ours = one_f_one_b(num_ranks, num_microbatches)
    last = num_ranks - 1
    assert theirs.programs[:last] == ours.programs[:last]
    assert theirs.program(last)[0] == Action(Kind.FORWARD, last, 1)
    assert Action(Kind.FORWARD, last, num_microbatches) in theirs.program(last)


@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
@by_shape
def test_torch_reads_every_cell(generator, num_ranks, num_microbatches):
    lowered = add_transfers(generator(num_ranks, num_microbatches))
    cells = [cell for row in csv.reader(format_csv(lowered).splitlines()) for cell in row]
    assert [str(torch_schedules._Action.from_str(cell)) for cell in cells] == cells


def metrics() -> dict[str, dict[str, str]]:
    with METRICS.open(newline="", encoding="utf-8") as lines:
        return {row["torch_name"]: row for row in csv.DictReader(lines)}


@pytest.mark.parametrize("name", metrics())
def test_tables_of_torch_take_their_known_time(name):
    """Schedules that we do not generate yet: interleaved, split backwards, V placement."""
    row = metrics()[name]
    made = torch_table(name, 4, 8, num_stages_per_rank=2)
    timeline = simulate(made, Costs.unit(made.num_stages))
    assert (timeline.makespan_s, timeline.longest_rank_span_s) == (float(row["makespan"]), float(row["zb_cost"]))
    assert list(timeline.peak_held_to_input_grad) == [int(n) for n in row["peak_F_to_I"].split()]
    assert list(timeline.peak_held_to_weight_grad) == [int(n) for n in row["peak_F_to_W"].split()]


@pytest.mark.parametrize("name", metrics())
def test_lowered_tables_take_the_same_time(name):
    """torch places transfers by rules of its own; ours are pure latency, so the end must not move."""
    made = torch_table(name, 4, 8, num_stages_per_rank=2)
    costs = Costs.uniform(made.num_stages, forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, transfer_s=0.25)
    theirs = torch_table(name, 4, 8, num_stages_per_rank=2, with_comms=True)
    assert theirs.is_lowered
    assert simulate(theirs, costs).makespan_s == simulate(made, costs).makespan_s
