"""What the benchmark beside the peers makes of the seconds that its processes saw."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.figures import (
    MemoryRow,
    Spread,
    beside_torch,
    loss_difference,
    memory_row,
    throughput_row,
    virtual_row,
)
from benchmarks.peers.trial import Trial

WAITING = Trial("a", "virtual", "1f1b", 4, 8, ("pipeloom", "torch"), 2, 1, 3, 0.01, 0.02)
IDLE = replace(WAITING, row="b", forward_s=0.0, backward_s=0.0)
GPT = Trial("c", "gpt", "1f1b", 2, 4, ("pipeloom", "torch"), 2, 1, 3)


def seen(pipeloom, torch, losses=None, num_processes=1):
    """What each of some processes reports, all the same."""
    process = {
        "steps_s": {"pipeloom": pipeloom, "torch": torch},
        "cpu_s": {"pipeloom": 0.6, "torch": 0.3},
        "losses": losses or {"pipeloom": [], "torch": []},
        "idle_peak_bytes": 100,
        "peak_bytes": 300,
    }
    return [process] * num_processes


def test_excess_is_over_the_simulated_makespan():
    row = virtual_row(WAITING, seen([0.3399, 0.3366, 0.3432], [0.33 * 1.08] * 3))
    assert row.unit == "excess"
    assert row.peers["pipeloom"].median == pytest.approx(0.03)
    assert row.peers["torch"].median == pytest.approx(0.08)


@pytest.mark.parametrize(("excess", "is_met"), [(0.039, True), (0.041, False)])
def test_half_of_the_excess_is_needed(excess, is_met):
    bar = virtual_row(WAITING, seen([0.33 * (1 + excess)] * 3, [0.33 * 1.08] * 3)).bar
    assert bar.ratio == pytest.approx(excess / 0.08)
    assert (bar.needed, bar.is_met) == ("≤ 0.5", is_met)


def test_stages_without_work_are_counted_by_action():
    row = virtual_row(IDLE, seen([0.016] * 3, [0.008] * 3))
    assert row.unit == "step_s_per_action"
    assert row.peers["pipeloom"].median == pytest.approx(0.001)
    assert not row.bar.is_met


def test_cpu_of_all_processes_is_added_up_per_step():
    row = virtual_row(IDLE, seen([0.016] * 3, [0.008] * 3, num_processes=4))
    assert row.cpu_s_per_step == {"pipeloom": pytest.approx(0.8), "torch": pytest.approx(0.4)}


@pytest.mark.parametrize(("step_s", "is_met"), [(0.1, True), (0.099, True), (0.101, False)])
def test_as_many_tokens_as_torch_are_needed(step_s, is_met):
    losses = {"pipeloom": [3.0, 2.0, 1.5], "torch": [3.0, 2.0, 1.0]}
    row = throughput_row(GPT, seen([step_s] * 3, [0.1] * 3, losses), tokens_per_step=1024)
    assert row.peers["torch"].median == pytest.approx(10240)
    assert (row.bar.needed, row.bar.is_met, row.loss_difference) == ("≥ 1", is_met, 0)


@pytest.mark.parametrize("losses", [[3.0, 2.01], [3.0, float("nan")], [3.0], []])
def test_other_losses_void_the_comparison(losses):
    row = throughput_row(GPT, seen([0.1] * 3, [0.1] * 3, {"pipeloom": losses, "torch": [3.0, 2.0]}), 1024)
    assert row.is_void
    assert row.bar is None


def test_a_loss_is_taken_from_whichever_process_has_it():
    first, last = seen([0.1] * 3, [0.1] * 3), seen([], [], {"pipeloom": [3.0, 2.0], "torch": [3.0, 2.0001]})
    row = throughput_row(GPT, first + last, 1024)
    assert row.loss_difference == pytest.approx(5e-5)
    assert not row.is_void


@given(st.lists(st.lists(st.floats(0.5, 10), min_size=3, max_size=3), min_size=1, max_size=4))
def test_loss_difference_is_zero_for_equals_alone(losses):
    difference = loss_difference(losses)
    assert (difference == 0) == all(each == losses[0] for each in losses)


def test_nobody_beside_pipeloom_leaves_no_bar():
    (alone,) = seen([0.016] * 3, [])
    row = virtual_row(IDLE, [alone | {"steps_s": {"pipeloom": [0.016] * 3}}])
    assert row.bar is None
    assert list(row.peers) == ["pipeloom"]


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=50))
def test_quartiles_stand_around_the_median(values):
    spread = Spread.of(values)
    assert min(values) <= spread.first_quartile <= spread.median <= spread.third_quartile
    assert (spread.third_quartile <= max(values), spread.num_steps) == (True, len(values))


def test_memory_is_told_by_rank_and_above_an_idle_process():
    row = memory_row("torch", seen([], [], num_processes=2))
    assert row == MemoryRow("torch", [300, 300], [200, 200])


def test_memory_has_its_ratio_to_the_largest_of_torch():
    rows = [MemoryRow("pipeloom", [90, 110], [0, 0]), MemoryRow("torch", [100, 80], [0, 0])]
    assert [row.ratio for row in beside_torch(rows)] == [pytest.approx(1.1), None]


def test_memory_without_figures_has_no_ratio():
    rows = [MemoryRow("pipeloom", [None], [None]), MemoryRow("torch", [None], [None])]
    assert beside_torch(rows) == rows
