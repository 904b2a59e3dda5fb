"""What papers print of schedules, made again by simulation; `tests/sim/tables` has the figures and their sources."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeloom.cost import Costs
from pipeloom.ir import Action, Schedule
from pipeloom.ir.relations import waits_for
from pipeloom.schedules import schedule
from pipeloom.sim import simulate

TABLES = Path(__file__).parents[1] / "sim" / "tables"


def rows(name: str) -> list[dict[str, str]]:
    with (TABLES / name).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def by_shape(name: str) -> dict[str, dict[str, str]]:
    return {f"{row['model']}-m{row['m']}": row for row in rows(name)}


# Zero Bubble (Qi et al., ICLR 2024), tables 5 and 6: its B is our I, and T_comm is latency that occupies nobody.

TIMES = by_shape("zero_bubble_table6_profiled_times.csv")
RATES = by_shape("zero_bubble_table5_bubble_rates.csv")
STAGES_PER_RANK = {"1.5B": 3, "6.2B": 4}
"""Of 1F1B-I: (layers + 2) ÷ ranks."""


def profiled(row: dict[str, str], stages_per_rank: int = 1) -> Costs:
    seconds = [float(row[column]) / 1e3 / stages_per_rank for column in ("T_F_ms", "T_B_ms", "T_W_ms")]
    forward_s, input_grad_s, weight_grad_s = seconds
    return Costs.uniform(
        int(row["p"]) * stages_per_rank,
        forward_s=forward_s,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
        transfer_s=float(row["T_comm_ms"]) / 1e3,
    )


@pytest.mark.parametrize("column", ["1F1B", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p"])
@pytest.mark.parametrize("shape", TIMES)
def test_zero_bubble_table_5(shape, column):
    row = TIMES[shape]
    costs = profiled(row)
    made = schedule(column, num_ranks=int(row["p"]), num_microbatches=int(row["m"]), costs=costs)
    assert f"{simulate(made, costs).bubble_fraction_unsynchronised:.4f}" == RATES[shape][column]


def interleaved_at(shape: str) -> tuple[Schedule, Costs]:
    row = TIMES[shape]
    v = STAGES_PER_RANK[row["model"]]
    made = schedule("1F1B-I", num_ranks=int(row["p"]), num_microbatches=int(row["m"]), stages_per_rank=v)
    return made, profiled(row, v)


def rate_of(schedule: Schedule, costs: Costs, span_s: float) -> float:
    num_on_a_rank = schedule.num_microbatches * schedule.num_stages // schedule.num_ranks
    step_s = costs.forward_s[0] + costs.input_grad_s[0] + costs.weight_grad_s[0]
    return 1 - num_on_a_rank * step_s / span_s


@pytest.mark.parametrize("shape", TIMES)
def test_interleaved_of_table_5_under_the_relaxed_dependency(shape):
    """Its authors let only the first micro-batch of a group wait for the rank from which it comes around."""
    made, costs = interleaved_at(shape)
    relaxed = rate_of(made, costs, longest_relaxed_span_s(made, costs))
    assert f"{relaxed:.4f}" == RATES[shape]["1F1B-I"]


@pytest.mark.parametrize("shape", TIMES)
def test_interleaved_with_all_dependencies_is_a_little_longer(shape):
    made, costs = interleaved_at(shape)
    rate = simulate(made, costs).bubble_fraction_unsynchronised
    p, transfer_s = made.num_ranks, costs.transfer_s
    step_s = costs.forward_s[0] + costs.input_grad_s[0] + costs.weight_grad_s[0]
    work_s = made.num_microbatches * made.num_stages // p * step_s
    bubble_s = (p - 1) * step_s + 2 * (made.num_stages - 1) * transfer_s
    assert rate == pytest.approx(bubble_s / (work_s + bubble_s), abs=1e-9)
    relaxed_s = longest_relaxed_span_s(made, costs) - work_s
    assert relaxed_s == pytest.approx(bubble_s - p * transfer_s, abs=1e-9)
    assert 0.00075 <= rate - float(RATES[shape]["1F1B-I"]) <= 0.0036


def longest_relaxed_span_s(schedule: Schedule, costs: Costs) -> float:
    """Run every rank as far as it comes, again and again, until all are done."""
    ends_s: dict[Action, float] = {}
    clocks_s, positions = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks
    while len(ends_s) < len(schedule):
        for rank, program in enumerate(schedule.programs):
            for action in program[positions[rank] :]:
                needs = list(relaxed_needs(action, schedule))
                if any(need not in ends_s for need in needs):
                    break
                arrivals_s = [ends_s[n] + costs.transfer_s * (schedule.rank_of(n.stage) != rank) for n in needs]
                start_s = max([clocks_s[rank], *arrivals_s])
                clocks_s[rank] = ends_s[action] = start_s + costs.duration_s(action.kind, action.stage)
                positions[rank] += 1
    starts_s = [ends_s[program[0]] - costs.forward_s[0] for program in schedule.programs]
    return max(end_s - start_s for end_s, start_s in zip(clocks_s, starts_s, strict=True))


def relaxed_needs(action: Action, schedule: Schedule) -> Iterator[Action]:
    last = schedule.num_ranks - 1
    for need in waits_for(action, schedule):
        comes_around = {schedule.rank_of(need.stage), schedule.rank_of(action.stage)} == {0, last}
        if not comes_around or action.microbatch % schedule.num_ranks == 0:
            yield need


# What shared/tables/schedules_p4_m8_metrics.csv says of every schedule in unit time.

METRICS = {row["schedule"]: row for row in rows("schedules_p4_m8_metrics.csv")}
MADE_AS = {
    "GPipe": ("gpipe", {}),
    "1F1B": ("1f1b", {}),
    "Eager-1F1B": ("eager-1f1b", {}),
    "Interleaved-1F1B v=2": ("interleaved", {"stages_per_rank": 2}),
    "LoopedBFS v=2": ("looped-bfs", {"stages_per_rank": 2}),
    "ZB-H1": ("zb-h1", {}),
    "ZB-H2": ("zb-h2", {}),
    "Interleaved-ZB v=2": ("interleaved-zb", {"stages_per_rank": 2}),
    "GIS v=2": ("gis", {"stages_per_rank": 2}),
    "GIS-H v=2 g=2": ("gis-h", {"stages_per_rank": 2}),
    "ZB-V (fixed)": ("zb-v", {}),
    "V-Half": ("v-half", {}),
    "V-Min": ("v-min", {}),
    "DualPipeV": ("dualpipe-v", {}),
    "DualPipe": ("dualpipe", {}),
    "Chimera (direct concatenation)": ("chimera", {}),
    "Hanayo W=1 (blocks of p)": ("hanayo", {"stages_per_rank": 2}),
    "Hanayo W=2 (blocks of p)": ("hanayo", {"stages_per_rank": 4}),
    "Llama3-style interleaved v=2 N=8=M": ("llama3", {"stages_per_rank": 2, "group_size": 8}),
}
NOT_MADE = {"ZB-V (authors search)", "Seq1F1B k=2"}


def test_every_row_of_the_metrics_is_looked_at():
    assert set(METRICS) == set(MADE_AS) | NOT_MADE


@pytest.mark.parametrize("name", MADE_AS)
def test_unit_metrics(name):
    row = METRICS[name]
    key, options = MADE_AS[name]
    made = schedule(key, num_ranks=4, num_microbatches=8, **options)
    timeline = simulate(made, Costs.unit(made.num_stages))
    assert made.num_stages == int(row["stages"])
    assert timeline.makespan_s == float(row["makespan"])
    assert timeline.longest_rank_span_s == float(row["zb_cost(longest rank span)"])
    assert timeline.busy_s == (float(row["busy_per_rank"]),) * 4
    assert f"{timeline.bubble_fraction:.4f}" == f"{float(row['bubble_by_makespan']):.4f}"
    assert f"{timeline.bubble_fraction_unsynchronised:.4f}" == f"{float(row['bubble_by_zb_cost']):.4f}"
    assert " ".join(map(str, timeline.peak_held_to_input_grad)) == row["peak_chunks_F_to_I_per_rank"]
    assert " ".join(map(str, timeline.peak_held_to_weight_grad)) == row["peak_chunks_F_to_W_per_rank"]


# Closed formulas, evaluated as they stand in the tables.

TIMES_OF_A_STAGE = [(1.0, 1.0, 1.0), (3.0, 2.0, 1.0), (2.0, 2.0, 1.5)]
by_times = pytest.mark.parametrize("times", TIMES_OF_A_STAGE, ids=str)


def bubble_s(made: Schedule, times: tuple[float, ...], *, is_synchronised: bool = True, **costs: float) -> float:
    forward_s, input_grad_s, weight_grad_s = times
    seconds = {"forward_s": forward_s, "input_grad_s": input_grad_s, "weight_grad_s": weight_grad_s}
    timeline = simulate(made, Costs.uniform(made.num_stages, **seconds, **costs))
    length_s = timeline.makespan_s if is_synchronised else timeline.longest_rank_span_s
    num_on_a_rank = made.num_microbatches * made.num_stages // made.num_ranks
    return length_s - num_on_a_rank * sum(times)


def value_of(formula: str, **letters: float) -> float:
    """A formula as the tables write it: a number or closed bracket before a letter or bracket multiplies it."""
    spaced = re.sub(r"(?<=[0-9a-zA-Z)])(?=\()|(?<=\))(?=[a-zA-Z])|(?<=\d)(?=[a-zA-Z(])|(?<=v)(?=\()", "*", formula)
    return float(eval(spaced, {}, letters))


@by_times
@pytest.mark.parametrize("row", rows("zb_table2_formulas.csv"), ids=lambda row: row["schedule"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_zero_bubble_table_2(row, num_ranks, times):
    made = schedule(row["schedule"], num_ranks=num_ranks, num_microbatches=3 * num_ranks)
    forward_s, input_grad_s, weight_grad_s = times
    expected = value_of(row["bubble_size"], p=num_ranks, TF=forward_s, TB=input_grad_s, TW=weight_grad_s)
    assert bubble_s(made, times, is_synchronised=row["schedule"] != "ZB-H2") == expected
    held = Costs.uniform(
        num_ranks,
        forward_s=1.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        bytes_held_to_input_grad=10,
        bytes_held_to_weight_grad=10 if row["schedule"] == "1F1B" else 4,
    )
    peaks = simulate(made, held).peak_activation_bytes
    by_rank = [
        value_of(row["per_worker_i_memory(1-based)"], p=num_ranks, i=i + 1, MB=10, MW=4) for i in range(num_ranks)
    ]
    assert max(peaks) == value_of(row["peak_activation_memory"], p=num_ranks, MB=10)
    assert list(peaks) == by_rank


DUALPIPE = {row["method"]: row for row in rows("dualpipe_readme.csv")}


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (2.0, 2.0, 1.5), (3.0, 3.0, 1.0)], ids=str)
@pytest.mark.parametrize("method", DUALPIPE)
@pytest.mark.parametrize("pp", [4, 8, 12])
def test_table_of_dualpipe(method, pp, times):
    """B is the whole backward there; a pair is one indivisible task, here as long as both."""
    forward_s, _, weight_grad_s = times
    backward_s = times[1] + times[2]
    num_ranks = pp // 2 if method == "DualPipeV" else pp
    made = schedule({"ZB1P": "zb-h1"}.get(method, method), num_ranks=num_ranks, num_microbatches=4 * pp)
    row = DUALPIPE[method]
    formula = row["bubble"].replace("F&B", "P")
    expected = value_of(formula, PP=pp, F=forward_s, B=backward_s, W=weight_grad_s, P=forward_s + backward_s)
    assert bubble_s(made, times, overlap_s=forward_s + backward_s) == expected
    timeline = simulate(made, Costs.unit(made.num_stages))
    assert max(timeline.peak_held_to_weight_grad) == value_of(row["activation_per_device(in PP-stage units)"], PP=pp)


@pytest.mark.parametrize("saved_s", [0.5, 1.0])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_dualpipe_gains_what_its_pairs_gain(num_ranks, saved_s):
    """The bubble of its table for pairs that are shorter than both of their actions, of which a rank has many."""
    made = schedule("dualpipe", num_ranks=num_ranks, num_microbatches=4 * num_ranks)
    num_pairs = {sum(o.first in set(program) for o in made.overlaps) for program in made.programs}
    found_s = bubble_s(made, (2.0, 2.0, 1.0), overlap_s=5.0 - saved_s) + max(num_pairs) * saved_s
    assert found_s == (num_ranks / 2 - 1) * (5.0 - saved_s + 3.0 - 3.0)


CHIMERA = {row["scheme"]: row for row in rows("chimera_formulas.csv")}


@pytest.mark.parametrize("scheme", ["GPipe", "DAPPLE (1F1B)", "Chimera"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_table_of_chimera(scheme, num_ranks, blocks):
    """At F = B, which it assumes."""
    made = schedule(scheme.split()[0], num_ranks=num_ranks, num_microbatches=blocks * num_ranks)
    costs = Costs.uniform(num_ranks, forward_s=2.0, input_grad_s=1.0, weight_grad_s=1.0)
    timeline = simulate(made, costs)
    row = CHIMERA[scheme]
    assert timeline.bubble_fraction == pytest.approx(
        value_of(row["bubble_ratio(F=B)"], D=num_ranks, N=blocks * num_ranks)
    )
    if scheme != "Chimera":
        return
    held = timeline.peak_held_to_weight_grad
    assert num_ranks // 2 + 1 <= max(held) <= num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_chimera_at_the_usual_ratio(num_ranks):
    made = schedule("chimera", num_ranks=num_ranks, num_microbatches=num_ranks)
    fraction = simulate(made, Costs.unit(num_ranks)).bubble_fraction
    assert fraction == pytest.approx((num_ranks - 2) / (1.5 * num_ranks + num_ranks - 2))


PIPEOFFLOAD = {row["schedule"]: row for row in rows("pipeoffload_table1.csv")}


@by_times
@pytest.mark.parametrize("name", ["1F1B-I", "GIS", "GIS-H"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("stages_per_rank", [2, 4])
def test_table_of_pipeoffload(name, num_ranks, stages_per_rank, times):
    """M is what 1F1B's first rank holds: as much as pv micro-batches of stages."""
    made = schedule(name, num_ranks=num_ranks, num_microbatches=3 * num_ranks, stages_per_rank=stages_per_rank)
    row, forward_s, input_grad_s, weight_grad_s = PIPEOFFLOAD[name], *times
    letters = {"d": num_ranks, "v": stages_per_rank, "M": num_ranks * stages_per_rank}
    expected = value_of(row["bubble"], TF=forward_s, TB=input_grad_s, TW=weight_grad_s, **letters)
    assert bubble_s(made, times) == expected
    held = max(simulate(made, Costs.unit(made.num_stages)).peak_held_to_input_grad)
    # The paper's 1F1B-I is rounded: its last rank has one warm-up forward less per micro-batch.
    assert held == value_of(row["peak_activation"], **letters) - (name == "1F1B-I")


CONTROLLABLE = {row["schedule"]: row for row in rows("controllable_memory_space.csv")}


@pytest.mark.parametrize("name", CONTROLLABLE)
@pytest.mark.parametrize("num_ranks", [4, 8, 16])
def test_table_of_controllable_memory(name, num_ranks):
    """A micro-batch is one of two stages on a rank; the rates are of long runs, up to a constant number of slots."""
    made = schedule(name, num_ranks=num_ranks, num_microbatches=3 * num_ranks)
    timeline = simulate(made, Costs.unit(made.num_stages))
    row, per_rank = CONTROLLABLE[name], made.num_stages // num_ranks
    held = value_of(row["activation_memory_in_microbatches"], p=num_ranks)
    assert max(timeline.peak_held_to_weight_grad) == held * per_rank
    slots_of_a_microbatch = 3 * per_rank
    idle_slots = timeline.longest_rank_span_s - slots_of_a_microbatch * made.num_microbatches
    rate = value_of(row["bubble_rate(TF=TB=TW)"].removeprefix("~"), p=num_ranks, m=made.num_microbatches)
    assert abs(idle_slots - rate * slots_of_a_microbatch * made.num_microbatches) <= 7
