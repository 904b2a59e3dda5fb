"""`pipeloom train` where every rank is a process: the run of one process, told once, stopped and resumed as one."""

import json
import re
from pathlib import Path

import pytest

from pipeloom.checkpoint import load_snapshot
from tests.launch.runs import losses, make_place, weights
from tests.processes.ranks import Ranks, start
from tests.train import ranks_of_run

SMALL = ("--config", "small.toml", "--model", "pipeloom.train.gpt:gpt")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one process."""
    folder = make_place(tmp_path_factory.mktemp("place"))
    words = [*SMALL, "--train.folder", "whole", "--pipeline.num_stages", "2"]
    ranks = start(ranks_of_run.train, 1, folder, folder, words)
    assert ranks.wait() == [0], ranks.output(0)
    return folder


def trained(place: Path, tmp_path: Path, num_ranks: int, *words: str, **spoiled: int) -> tuple[list[int], Ranks]:
    order = (spoiled.get("rank", -1), spoiled.get("step", 0))
    ranks = start(ranks_of_run.train, num_ranks, tmp_path, place, list(words), *order)
    return ranks.wait(), ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_run_of_many_processes_is_that_of_one(place: Path, tmp_path: Path, num_ranks: int) -> None:
    codes, ranks = trained(place, tmp_path, num_ranks, *SMALL, "--train.folder", f"of-{num_ranks}")
    assert codes == [0] * num_ranks, ranks.output(0)
    assert len(weights(place / f"of-{num_ranks}")) == 2 * num_ranks
    assert state(place / f"of-{num_ranks}") == state(place / "whole")
    assert losses(place / f"of-{num_ranks}") == losses(place / "whole")


def test_progress_is_shown_by_one_rank(place: Path, tmp_path: Path) -> None:
    _, ranks = trained(place, tmp_path, 2, *SMALL, "--train.folder", "shown")
    lines = ranks.last_lines(0)
    assert "stages on 2 processes" in ranks.output(0)
    assert [line.split()[1] for line in lines if line.startswith("step: ") and "grad_norm" in line] == list("12345678")
    assert ranks.output(1) == ""


def test_run_goes_on_in_any_number_of_processes(place: Path, tmp_path: Path) -> None:
    for stop_after, num_ranks in ((3, 2), (5, 3), (8, 1)):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        how = ("--resume", "moved") if stop_after > 3 else (*SMALL, "--train.folder", "moved")
        codes, ranks = trained(place, folder, num_ranks, *how, "--stop-after", str(stop_after))
        assert codes == [0] * num_ranks, ranks.output(0)
    assert state(place / "moved") == state(place / "whole")
    moved, whole = ([each for each in losses(place / run) if each[0] == "step"] for run in ("moved", "whole"))
    assert moved == whole


def state(run: Path) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, whatever the cut."""
    snapshot = load_snapshot(run / "checkpoints/step-000008")
    slots = {f"{n}/{slot}": value for n, each in snapshot.optimizer.items() for slot, value in each.items()}
    return {name: value.numpy().tobytes() for name, value in (snapshot.model | slots).items()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pipeline.num_stages", "3"), "command line: pipeline.num_stages is 3, but there are 2 processes"),
        (("--config", "nowhere.toml"), "cannot read the configuration nowhere.toml"),
        (("--train.steps", "x"), "command line: train.steps was given 'x'"),
        (("--model", "nowhere:gpt"), "there is no module 'nowhere'"),
        (("--pipeline.schedule", "1f1"), "schedule '1f1' is unknown"),
        (("--model", "tests.train.ranks_of_run:classifier"), "the model returned (1, 16, 10); next-byte logits of"),
        (("--resume", "nowhere"), "nowhere is neither a run nor a checkpoint"),
        (("--resume", "whole", "--model.width", "32"), "the checkpoint of step 8 is a checkpoint of another model"),
        (("--train.folder", "whole"), "the run folder whole holds a run"),
    ],
)
def test_wrong_value_is_said_once(place: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    given = ("--train.folder", "wrong") if "--train.folder" not in words and "--resume" not in words else ()
    codes, ranks = trained(place, tmp_path, 2, *SMALL, *given, *words)
    said = "".join(ranks.output(rank) for rank in range(2))
    assert codes == [2, 2], said
    assert said.count("error: ") == 1
    assert message in said
    assert not (place / "wrong").exists()


def test_signal_to_one_rank_stops_all_after_the_same_step(place: Path, tmp_path: Path) -> None:
    codes, ranks = trained(place, tmp_path, 3, *SMALL, "--train.folder", "stopped", rank=1, step=-4)
    assert codes == [143] * 3, ranks.output(0)
    assert ranks.last_lines(0)[-2:] == [
        "terminated after step 5; saved stopped/checkpoints/step-000005",
        "continue with: pipeloom train --launch 3 --resume stopped",
    ]
    layout = json.loads((place / "stopped/checkpoints/step-000005/manifest.json").read_text())["layout"]
    assert layout["num_ranks"] == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_exception_between_steps_is_everybodys_cause(place: Path, tmp_path: Path, rank: int) -> None:
    words = (*SMALL, "--train.folder", f"failed-{rank}")
    codes, ranks = trained(place, tmp_path, 2, *words, rank=rank, step=2)
    assert codes == [1, 1]
    line = rf"rank {rank}, outside a step, after step 1: ValueError: the user's own mistake"
    assert re.search(line, ranks.output(1 - rank)), ranks.output(1 - rank)
    assert "ValueError: the user's own mistake" in ranks.output(rank)
