"""The table of the benchmark beside the peers, as it is read."""

import pytest

from benchmarks.peers.figures import Bar, MemoryRow, Row, Spread
from benchmarks.peers.table import table


def row(name, unit, ours, theirs, bar, **more):
    peers = {"pipeloom": Spread(*ours, 9), "torch": Spread(*theirs, 9)}
    return Row(name, unit, "1f1b", 4, 8, peers, {"pipeloom": 0.0064, "torch": 0.0128}, bar, **more)


WAITING = row("a", "excess", (0.031, 0.028, 0.036), (0.08, 0.075, 0.1), Bar(0.39, "≤ 0.5", True))
IDLE = row("b", "step_s_per_action", (0.0005, 0.0004, 0.0006), (0.0008, 0.0007, 0.001), Bar(0.63, "≤ 0.5", False))
TOKENS = (8000.0, 8100.0, 7900.0), (7500.0, 7600.0, 7400.0)
MEMORY = [MemoryRow("pipeloom", [2**20 * 380, 2**20 * 371], [2**20 * 160, 2**20 * 151], 1.02)]


def test_a_part_reads_as_a_table():
    assert table([WAITING]).splitlines() == [
        "(a) Stages that wait 10 ms forward and 20 ms backward: what a step takes beyond its simulated makespan",
        "                 Pipeloom              torch                  Pipeloom ÷ torch",
        "1f1b   4 × 8     3.1 % [2.8 %, 3.6 %]  8.0 % [7.5 %, 10.0 %]  0.39, needed ≤ 0.5: met",
    ]


def test_a_missed_bar_is_said_and_cpu_stands_below():
    lines = table([IDLE]).splitlines()
    assert lines[2].split("  ")[-1] == "0.63, needed ≤ 0.5: MISSED"
    assert lines[3:] == [
        "CPU of all ranks together ÷ all their compute actions, ms",
        "1f1b   4 × 8     0.10               0.20",
    ]


def test_throughput_says_what_its_losses_allow():
    lines = table([row("c", "tokens_per_s", *TOKENS, Bar(1.07, "≥ 1", True), loss_difference=2e-7)]).splitlines()
    assert "8,000 [7,900, 8,100]" in lines[2]
    assert lines[3].startswith("Losses of the first steps differ by at most 2e-07 of their size")
    assert lines[3].endswith("; 1e-04 is allowed.")


def test_a_void_comparison_is_shouted():
    lines = table([row("c", "tokens_per_s", *TOKENS, None, loss_difference=0.1, is_void=True)]).splitlines()
    assert lines[2].endswith("  void")
    assert lines[3].endswith("1e-04 is allowed: VOID, they do not compute the same.")


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (MEMORY, "Pipeloom         380 (160), 371 (151)      1.02 of torch's"),
        ([MemoryRow("torch", [None], [None])], "torch            ? (?)"),
    ],
)
def test_memory_stands_by_rank(rows, line):
    assert table(rows).splitlines()[1] == line


def test_parts_are_apart():
    assert [part[:3] for part in table([WAITING, IDLE, *MEMORY]).split("\n\n")] == ["(a)", "(b)", "(d)"]
