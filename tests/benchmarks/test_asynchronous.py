"""`python -m benchmarks.asynchronous`, small; how well anything trains is no test's business."""

import json
import sys

import pytest

from benchmarks import asynchronous

SMALL = ["--steps", "3", "--width", "16", "--schedules", "1f1b,pipedream-2bw", "--json"]


@pytest.mark.parametrize("options", [[], ["--nu", "0.8", "--beta1", "0.95"]], ids=["adamw", "qhadam"])
def test_every_schedule_trains_as_many_steps(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["asynchronous", *SMALL, *options])
    asynchronous.main()
    synchronous, late = json.loads(capsys.readouterr().out)["rows"]
    assert (synchronous["schedule"], late["schedule"]) == ("1f1b", "pipedream-2bw")
    assert synchronous["ratio"] == 1
    assert late["ratio"] == late["held_out_loss"] / synchronous["held_out_loss"] != 1
    assert late["versions_held"] == [2, 2]
