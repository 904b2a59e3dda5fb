"""The benchmark of the simulator still runs; what it measures is no test's business."""

import json
import sys

import pytest

from benchmarks import simulator


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(simulator, "SHAPES", ((2, 4), (4, 8)))
    monkeypatch.setattr(simulator, "LARGE", (2, 4))


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["simulator", "--repeats", "1", *arguments])
    simulator.main()
    return capsys.readouterr().out


def test_rows_are_printed(monkeypatch, capsys):
    lines = run(monkeypatch, capsys).splitlines()
    assert lines[0].split() == ["schedule", "transfers", "ranks", "micro-batches", "actions", "actions/s", "ratio"]
    assert [line.split()[0] for line in lines[1:9]] == ["gpipe"] * 4 + ["1f1b"] * 4
    assert lines[10].startswith("2 ranks x 4 micro-batches x 2 stages per rank: generated ")


def test_rows_as_json(monkeypatch, capsys):
    printed = json.loads(run(monkeypatch, capsys, "--json"))
    rows = printed["rows"]
    assert [row["num_actions"] for row in rows] == [16, 64, 32, 160] * 2
    assert all(row["actions_per_s"] == pytest.approx(row["num_actions"] / row["best_s"]) for row in rows)
    assert [row["time_per_action_ratio"] for row in rows[::2]] == [1.0] * 4
    assert list(printed["large"]) == ["generated_s", "verified_s", "simulated_s"]
