"""`python -m benchmarks.asynchronous`, small; how well anything trains is no test's business."""

import json
import sys

import pytest

from benchmarks import asynchronous

SMALL = ["--steps", "3", "--width", "16", "--schedules", "1f1b,pipedream-2bw", "--json"]


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*options):
        monkeypatch.setattr(sys, "argv", ["asynchronous", *SMALL, *options])
        asynchronous.main()
        return json.loads(capsys.readouterr().out)["rows"]

    return run


def test_a_stream_stands_beside_synchronous_training(run):
    synchronous, late = run()
    assert (synchronous["schedule"], late["schedule"]) == ("1f1b", "pipedream-2bw")
    assert synchronous["ratio"] == 1
    assert late["ratio"] == late["held_out_loss"] / synchronous["held_out_loss"] != 1
    assert late["versions_held"] == [2, 2]


def test_both_train_with_the_optimizer_that_is_asked_for(run):
    """With all of a step momentum, QHAdam is Adam; with less, it trains another model, by every schedule."""
    found = [run("--learning-rate", "0.1", "--nu", nu) for nu in ("1", "0.999999", "0.5")]
    losses = [[row["held_out_loss"] for row in rows] for rows in found]
    adamw, nearly_adamw, qhadam = losses
    assert nearly_adamw == pytest.approx(adamw, rel=1e-5)
    assert all(abs(one - other) > 1e-4 * one for one, other in zip(qhadam, adamw, strict=True)), losses
