"""`python -m benchmarks.torch_schedules`, small; how fast anything is is no test's business."""

import itertools
import json
import math
import socket
import threading

import pytest
import torch
from torch import nn

import pipeloom as pl
from benchmarks.devices.threads import by_hand
from benchmarks.torch_schedules import __main__ as command
from benchmarks.torch_schedules.by_hand import HandMade
from benchmarks.torch_schedules.trial import CLASSES, Trial
from benchmarks.torch_schedules.worker import medians, one_stage_s, steps_s


def found(trial):
    step_s = trial.simulated_s
    return {
        "steps_s": {"pipeloom": [1.03 * step_s] * 3, "torch": [1.1 * step_s] * 3, "by_hand": [1.02 * step_s] * 3},
        "one_stage_s": {"F": 0.01, "I": 0.0104, "W": 0.0102},
    }


@pytest.fixture
def pretended(monkeypatch):
    monkeypatch.setattr(command, "result_of_processes", lambda worker, count, given: found(Trial(**given)))


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_all_three_run_in_the_same_processes(name, capsys):
    code = command.main(
        ["--schedules", name, "--sizes", "2x4", "--forward-ms", "1", "--rounds", "1", "--steps", "2", "--json"]
    )
    (row,) = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [row["excess"][name]["num_steps"] for name in ("pipeloom", "torch", "by_hand")] == [2, 2, 2]
    ours, torchs, by_hand = (row["excess"][name]["median"] for name in ("pipeloom", "torch", "by_hand"))
    assert (row["ratio"], row["by_hand_ratio"]) == pytest.approx((ours / torchs, by_hand / torchs))
    assert all(seconds >= 0.001 for seconds in row["one_stage_s"].values())


def test_every_schedule_has_a_line(pretended, capsys):
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == 2 * list(CLASSES)
    assert all(" 0.30 met " in line and " 0.20 " in line for line in lines)
    assert lines[0].split()[-3:] == ["10.00", "10.40", "10.20"]


def test_json_has_seconds(pretended, capsys):
    command.main(["--json", "--schedules", "gpipe", "--forward-ms", "10"])
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["simulated_s"], row["ratio"], row["by_hand_ratio"]) == pytest.approx((0.33, 0.3, 0.2))


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [("--schedules", "zb-h1", "torch has gpipe"), ("--sizes", "4", "sizes like 4x8,8x32 are needed")],
)
def test_what_cannot_be_ends_with_one_message(option, given, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main([option, given])
    assert said in capsys.readouterr().err


def test_a_step_lasts_from_the_first_rank_to_the_last():
    first, second = {"torch": [(1.0, 2.0), (3.0, 4.5)]}, {"torch": [(1.1, 2.5), (2.9, 4.0)]}
    assert steps_s([first, second]) == {"torch": [1.5, 1.5]}


def test_one_stage_waits_in_torchs_halves_too():
    torch.manual_seed(0)
    seconds = one_stage_s(Trial("zb-v", 2, 4, 0.002, 1, 1))
    assert list(seconds) == ["F", "I", "W"]
    assert min(seconds.values()) >= 0.002
    assert medians([{"F": 1.0}, {"F": 9.0}, {"F": 2.0}]) == {"F": 2.0}


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_a_loop_by_hand_passes_on_what_the_stages_make(name):
    """Three ranks as threads: stages that multiply what they get by two and more, so that each makes another number."""
    made = pl.schedule(name, num_ranks=3, num_microbatches=6)
    factors = range(2, 2 + made.num_stages)
    ends = {pair: socket.socketpair() for pair in [(0, 1), (0, 2), (1, 2)]}
    found: dict[str, float] = {}

    class Times(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(float(factor)))

        def forward(self, value):
            return value * self.weight

    def work_of(rank):
        work = by_hand([Times(factor) for factor in factors], torch.ones(1, 1))

        def work_and_note(action, given):
            value = work(action, given)
            if value is not None:
                found[str(action)] = float(value)
            return value

        peers = {b if a == rank else a: pair[a != rank] for (a, b), pair in ends.items() if rank in (a, b)}
        return HandMade(made, rank, peers, work_and_note)

    loops = [work_of(rank) for rank in range(3)]
    threads = [threading.Thread(target=loop.step) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for loop in loops:
        loop.close()
    back = "B" if name != "zb-v" else "I"
    for stage, i in itertools.product(range(made.num_stages), range(6)):
        assert found[f"{stage}F{i}"] == math.prod(factors[: stage + 1])
        assert found[f"{stage}{back}{i}"] == math.prod(factors[stage:])


def test_a_loop_by_hand_says_who_is_gone():
    here, there = socket.socketpair()
    loop = HandMade(pl.schedule("1f1b", num_ranks=2, num_microbatches=1), 1, {0: here}, lambda *_: torch.ones(1, 1))
    there.close()
    with pytest.raises(ConnectionError, match="rank 0 is gone"):
        loop.step()
    loop.close()
