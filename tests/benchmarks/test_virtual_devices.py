"""`python -m benchmarks.virtual_devices`, small; how fast anything is is no test's business."""

import json

import pytest
import torch

import pipeloom as pl
from benchmarks import virtual_devices
from benchmarks.devices.threads import by_hand, threads_s
from pipeloom.testing import virtual_stages


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setattr(virtual_devices, "TIMES_S", (0.001, 0.002, 0.001))

    def run(*arguments):
        virtual_devices.main(["--sizes", "2x4", "--steps", "1", *arguments])
        return capsys.readouterr().out

    return run


def test_a_step_stands_beside_threads_that_do_less(run):
    rows = json.loads(run("--schedules", "1f1b,interleaved,zb-v", "--json"))
    assert [row["schedule"] for row in rows] == ["1f1b", "interleaved", "zb-v"]
    assert [row["simulated_s"] for row in rows] == pytest.approx([0.015, 0.027, 0.025])
    for row in rows:
        whats = ("step", "bare_threads", "torch_by_hand")
        step, bare, hand = (row[f"{what}_over_simulated"] - 1 for what in whats)
        assert row["excess_over_bare_threads"] == pytest.approx(step / bare)
        assert row["excess_over_torch_by_hand"] == pytest.approx(step / hand)
        assert row["stages_alone_over_simulated"] >= 1  # a stage never waits too little


@pytest.mark.parametrize(("is_split", "least_s"), [(True, (0.001, 0.002, 0.003)), (False, (0.001, 0.0025, 0.0025))])
def test_a_stage_alone_takes_its_times(is_split, least_s, monkeypatch):
    monkeypatch.setattr(virtual_devices, "TIMES_S", (0.001, 0.005, 0.003))
    found = virtual_devices.stage_alone_s(is_split=is_split)
    assert all(each >= least for each, least in zip(found, least_s, strict=True)), found


def test_what_does_not_run_says_why(run):
    head, _, row = run("--schedules", "2f2b").splitlines()[-3:]
    assert "simulated makespan" in head
    assert row.split()[:3] == ["2f2b", "2", "4"]
    assert "not run: schedule '2f2b' is unknown" in row


def test_sizes_that_are_none_end_with_one_message(capsys):
    with pytest.raises(SystemExit, match="2"):
        virtual_devices.main(["--sizes", "4-8"])
    assert "argument --sizes: '4-8' was given; sizes like 4x8,8x32 are needed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpipe", "gpipe-recompute", "zb-h1", "zb-v"])
def test_the_loop_by_hand_does_what_a_step_does(name):
    """A stage of weight zero passes on what it is given, so inputs and gradients have to be whole at the ends.

    The loop once took R for a backward, died, and the benchmark of all schedules waited for it forever.
    """
    schedule = pl.schedule(name, num_ranks=2, num_microbatches=3)
    stages, seen = virtual_stages(schedule.num_stages, 0, 0), {}

    def watched(action, received):
        seen[action] = work(action, received)
        return seen[action]

    work = by_hand(stages, torch.full((1, 1), 3.0))
    assert threads_s(schedule, [watched] * 2) > 0
    assert seen.keys() == schedule.actions
    assert {value.item() for value in seen.values() if value is not None} == {1.0, 3.0}
    assert all(stage.weight.grad is not None for stage in stages)


@pytest.mark.parametrize("which", ["0F1", "1F0", "1B2"])
def test_a_thread_that_dies_ends_all(which):
    """The others once waited for its values forever, and the benchmark with them."""

    def work(action, _):
        if str(action) == which:
            raise ValueError(f"died in {which}")

    with pytest.raises(ValueError, match=f"died in {which}"):
        threads_s(pl.schedule("1f1b", num_ranks=2, num_microbatches=3), [work] * 2)
