"""The tables that torch 2.13 prints, read by our notation: an implementation that we did not write."""

import csv
from pathlib import Path

import pytest

from pipeloom.cost import Costs
from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.notation import format_csv, parse_csv
from pipeloom.passes import add_transfers, without_sharding
from pipeloom.schedules import gpipe, one_f_one_b, schedule
from pipeloom.schedules.interleaved_zb import interleaved_zb
from pipeloom.sim import simulate

visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

METRICS = Path(__file__).parents[1] / "sim" / "tables" / "torch_tables_p4_m8_metrics.csv"
SHAPES = [(2, 4), (3, 5), (4, 8), (8, 16)]

by_shape = pytest.mark.parametrize(("num_ranks", "num_microbatches"), SHAPES)


def torch_table(name, num_ranks, num_microbatches, **options) -> Schedule:
    """torch's table through its own text; it writes idle slots as empty cells."""
    table = visualizer.get_schedule_ops(name, num_ranks, num_microbatches, **options)
    text = "\n".join(",".join("" if a is None else str(a) for a in row) for row in table)
    return without_sharding(parse_csv(text))


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


MANY = [(p, v, m) for p in (2, 3, 4, 8) for v in (2, 3) for m in (1, 2, p, 2 * p, 3 * p, 2 * p + 2, 5 * p)]
LOOPED = {
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
}


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize(("num_ranks", "stages_per_rank", "num_microbatches"), MANY)
def test_looped_schedules_are_those_of_torch(name, num_ranks, stages_per_rank, num_microbatches):
    """torch demands that its rounds come out even; where they do not, we have groups as even as can be."""
    shape = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    ours = schedule(name, **shape)
    is_even = num_microbatches % max(1, num_microbatches // num_ranks) == 0
    if name == "looped-bfs" or is_even:
        assert torch_table(LOOPED[name], num_ranks, num_microbatches, num_stages_per_rank=stages_per_rank) == ours
    else:
        with pytest.raises(ValueError, match="number of rounds"):
            torch_table(LOOPED[name], num_ranks, num_microbatches, num_stages_per_rank=stages_per_rank)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_stage(num_ranks, rounds):
    """torch wants two stages per rank, but its rule for the order takes one as well."""
    made = interleaved_zb(num_ranks, rounds * num_ranks, 1)
    assert made.programs == schedule("zb-h1", num_ranks=num_ranks, num_microbatches=rounds * num_ranks).programs


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("factor", [0.5, 1, 2, 3, 5.5])
def test_zb_v_is_that_of_torch(num_ranks, factor):
    num_microbatches = max(1, int(factor * num_ranks))
    theirs = torch_table("ZBVZeroBubble", num_ranks, num_microbatches, num_stages_per_rank=2)
    assert theirs == schedule("zb-v", num_ranks=num_ranks, num_microbatches=num_microbatches)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 2, 9])
def test_dualpipe_v_is_that_of_torch(num_ranks, more):
    """Also the pairs that overlap; fewer than 2p micro-batches torch refuses."""
    num_microbatches = 2 * num_ranks + more
    theirs = torch_table("DualPipeV", num_ranks, num_microbatches, num_stages_per_rank=2)
    ours = schedule("dualpipe-v", num_ranks=num_ranks, num_microbatches=num_microbatches)
    assert theirs == ours
    assert theirs.overlaps == ours.overlaps != frozenset()


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
    """Read from their text: interleaved, split backwards, V placement."""
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
