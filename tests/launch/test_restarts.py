"""Ranks are killed at moments of our choosing; what is trained in the end is what an undisturbed run trains."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.launch.runs import losses, make_place, started, trained, weights

SMALL = ("--config", "small.toml")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an undisturbed run, in one process."""
    folder = make_place(tmp_path_factory.mktemp("place"))
    done = trained(folder, *SMALL, "--train.folder", "whole")
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def launched(place: Path, run: str, *words: str, victim: str = "- - 0 -") -> tuple[int, str, str]:
    done = trained(place, *SMALL, "--train.folder", run, "--launch", "2", *words, victim=victim)
    return done.returncode, done.stdout, done.stderr


def assert_whole(place: Path, run: str) -> None:
    """The run is the undisturbed one, to the bit, and has no step twice."""
    assert weights(place / run) == weights(place / "whole")
    assert losses(place / run) == losses(place / "whole")


def test_launched_run_is_that_of_one_process(place: Path) -> None:
    code, out, err = launched(place, "launched")
    assert (code, err) == (0, "")
    assert "2 stages on 2 processes" in out
    assert out.count("step: 1  loss: ") == 1
    assert_whole(place, "launched")


@pytest.mark.parametrize(
    ("victim", "from_steps"),
    [
        ("1 start 0 0", {0}),
        ("1 step 6 0", {0, 3}),  # the checkpoint was begun, and may be whole by now
        ("0 evaluation 3 0", {0, 3}),
        ("1 save 1 0", {0}),
        ("0 save 4 0", {0}),
    ],
)
def test_killed_rank_changes_nothing(place: Path, victim: str, from_steps: set[int]) -> None:
    run = victim.replace(" ", "-")
    code, out, err = launched(place, run, "--max-restarts", "1", victim=victim)
    assert code == 0, err
    assert err.endswith("starting again, 1 of 1 times\n")
    assert out.splitlines()[-3].startswith("step: 8  held_out_loss")
    assert int(re.findall(f"run: {run}, from step (.*)", out)[-1]) in from_steps
    assert_whole(place, run)


def test_run_that_went_on_from_another_one_begins_there_again(place: Path) -> None:
    words = ("--resume", "whole/checkpoints/step-000003", "--max-restarts", "1")
    code, out, err = launched(place, "branch", *words, victim="1 step 2 0")
    assert code == 0, err
    assert out.count("run: branch, from step 3\n") == 2
    assert weights(place / "branch") == weights(place / "whole")
    first, *others = losses(place / "branch")
    assert first[:2] == ("held_out", 3)
    assert others == [each for each in losses(place / "whole") if each[1] > 3]


def test_cause_is_the_last_line_when_restarts_are_used_up(place: Path) -> None:
    code, _, err = launched(place, "used-up", "--max-restarts", "1", victim="1 mistake 2 all")
    lines = err.splitlines()
    assert code == 1
    assert lines[-1] == "rank 1, outside a step, after step 0: ValueError: the user's own mistake"
    assert lines.count("Traceback (most recent call last):") == 2, "one for each attempt"
    assert lines.count("starting again, 1 of 1 times") == 1


def test_wrong_value_that_ranks_find_is_said_once(place: Path) -> None:
    code, out, err = launched(place, "wrong", "--data.paths", "nowhere", "--max-restarts", "3")
    assert (code, out) == (2, "")
    assert err.splitlines()[0].startswith("pipeloom: error: cannot read the data path 'nowhere'")
    assert len(err.splitlines()) == 2
    assert not (place / "wrong").exists()


def test_sigterm_saves_once_and_the_run_goes_on_elsewhere(place: Path) -> None:
    words = (*SMALL, "--train.folder", "stopped", "--launch", "2", "--train.steps", "100000")
    process = started(place, *words)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step: 2  loss"):
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate(timeout=280)
    assert (process.returncode, err) == (143, "stopping after this step; a second signal ends at once\n")
    *_, last, hint = out.splitlines()
    step_index = json.loads((place / "stopped/metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert last == f"terminated after step {step_index}; saved stopped/checkpoints/step-{step_index:06d}"
    assert hint == "continue with: pipeloom train --launch 2 --resume stopped"
