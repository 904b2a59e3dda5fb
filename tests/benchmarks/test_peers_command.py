"""`python -m benchmarks.peers` without its processes."""

import json
import sys

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers.launch import TrialFailed
from benchmarks.peers.trial import Trial


def pretend(trial: Trial):
    """Every peer takes as long as any other."""
    return [
        {
            "steps_s": {peer: [0.5] * 3 for peer in trial.peers},
            "cpu_s": dict.fromkeys(trial.peers, 0.1),
            "losses": {peer: [2.0] * 5 for peer in trial.peers},
            "idle_peak_bytes": 2**20,
            "peak_bytes": 2**21,
        }
    ] * trial.num_processes


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setattr(command, "seen_by_processes", pretend)
    monkeypatch.setattr(command, "has_deepspeed", lambda: False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["peers", *arguments])
        code = command.main()
        return code, capsys.readouterr()

    return run


def test_every_part_is_printed_under_the_machine(run):
    code, printed = run("--quick")
    parts = printed.out.split("\n\n")
    assert [part[:3] for part in parts[1:]] == ["(a)", "(b)", "(c)", "(d)"]
    assert " cores, " in parts[0]
    assert (code, printed.err) == (0, "")


def test_json_has_machine_and_rows(run):
    found = json.loads(run("--json", "--rows", "ca")[1].out)
    assert found["machine"].keys() >= {"num_cores", "torch", "load_average"}
    assert [(row["row"], row["num_ranks"], row["num_microbatches"]) for row in found["rows"]] == [
        *[("a", 4, 8)] * 2,
        *[("a", 8, 32)] * 2,
        ("c", 2, 4),
    ]
    assert found["rows"][-1]["bar"] == {"ratio": 1.0, "needed": "≥ 1", "is_met": True}


def test_memory_is_measured_one_peer_at_a_time(run):
    rows = json.loads(run("--json", "--rows", "d")[1].out)["rows"]
    assert [row["peer"] for row in rows] == ["pipeloom", "torch", "by_hand", "one_process"]
    assert [len(row["peak_bytes"]) for row in rows] == [2, 2, 2, 1]
    assert [row["ratio"] for row in rows] == [1.0, None, 1.0, 1.0]


def test_deepspeed_takes_part_where_it_is_installed(run, monkeypatch):
    monkeypatch.setattr(command, "has_deepspeed", lambda: True)
    (row,) = json.loads(run("--json", "--rows", "c")[1].out)["rows"]
    assert list(row["peers"])[-1] == "deepspeed"


def test_a_failed_part_leaves_the_others(run, monkeypatch):
    def fail_on_virtual(trial):
        if trial.model == "virtual":
            raise TrialFailed("ValueError: no such thing")
        return pretend(trial)

    monkeypatch.setattr(command, "seen_by_processes", fail_on_virtual)
    code, printed = run("--rows", "ac")
    assert code == 1
    assert "(c) The default GPT" in printed.out
    assert printed.err == "\n(a) failed:\nValueError: no such thing\n"


@pytest.mark.parametrize("given", ["e", "ab d", ""])
def test_unknown_rows_end_with_one_message(run, capsys, given):
    with pytest.raises(SystemExit, match="2"):
        run("--rows", given)
    assert f"argument --rows: {given!r} was given; some of the letters abcd are needed" in capsys.readouterr().err


def test_quick_takes_fewer_steps(run, monkeypatch):
    asked = []
    monkeypatch.setattr(command, "seen_by_processes", lambda trial: asked.append(trial) or pretend(trial))
    for arguments in ([], ["--quick"]):
        run("--rows", "b", *arguments)
    full, quick = asked[0], asked[4]
    assert quick.num_rounds * quick.num_steps < full.num_rounds * full.num_steps
    assert (quick.peers, quick.forward_s, quick.backward_s) == (full.peers, 0.0, 0.0)
