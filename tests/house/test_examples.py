import importlib
import re
from pathlib import Path

import pytest

import pipeloom as pl
from tests.processes.launch import torchrun

FOLDER = Path(__file__).parents[2] / "examples"


def test_first_pipeline_learns_and_keeps_its_bits(capsys: pytest.CaptureFixture[str]) -> None:
    first, last = importlib.import_module("examples.first_pipeline").main(num_steps=60)
    assert last < first
    assert "weights equal to the bit: True" in capsys.readouterr().out


def test_timelines_draws_predicted_above_measured(capsys: pytest.CaptureFixture[str]) -> None:
    predicted, measured = importlib.import_module("examples.timelines").main()
    assert predicted.makespan_s == pytest.approx(0.27)
    assert measured.makespan_s > predicted.makespan_s
    assert capsys.readouterr().out.count("GPU 0: F0") == 2


@pytest.mark.parametrize("num_microbatches", [1, 2, 6])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_own_schedule_verifies_at_every_size(num_ranks: int, num_microbatches: int) -> None:
    made = importlib.import_module("examples.own_schedule").frugal(num_ranks, num_microbatches)
    assert pl.verify(made) == []


def test_own_schedule_runs(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("examples.own_schedule").main()
    assert "frugal: idle 57%, holds (3, 2, 1, 1)\nand it trains: loss " in capsys.readouterr().out


def test_the_page_lists_every_script() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in FOLDER.glob("*.py"))


def test_three_ways_end_at_the_same_bits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    losses = importlib.import_module("examples.three_ways").main(num_steps=40)
    threads = capsys.readouterr().out
    found = torchrun(4, tmp_path, [str(FOLDER / "three_ways.py")])
    assert found.outputs == [threads, "", "", ""]
    assert losses[-1] < losses[0]
