"""Processes write one checkpoint together, and any other number of them goes on from it, equal to the bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeloom.archive.verify import faults_of
from pipeloom.checkpoint import CheckpointStore, Snapshot, load_snapshot
from tests.checkpoint import process_run
from tests.processes.launch import Finished, torchrun


@pytest.fixture(scope="module", autouse=True)
def path_of_processes() -> Iterator[None]:
    """Started processes find the tests as this one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield


def in_processes(num_processes: int, folder: Path, num_stages: int, schedule: str, *steps: int) -> Finished:
    words = [process_run.__file__, *map(str, (folder, num_stages, schedule, *steps))]
    return torchrun(num_processes, folder / f"logs-{num_processes}-{steps[0]}", words)


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in two processes, with checkpoints after two and four, as a store of the first."""
    folder = tmp_path_factory.mktemp("run")
    done = in_processes(2, folder, 2, "1f1b", 0, 4)
    assert done.code == 0, done.outputs
    (folder / "from-0-2" / "step-000002").rename(folder / "step-000002")
    return folder


def assert_same(one: Snapshot, other: Snapshot) -> None:
    assert one.model.keys() == other.model.keys()
    assert [name for name in one.model if not torch.equal(one.model[name], other.model[name])] == []
    assert one.optimizer.keys() == other.optimizer.keys()
    pairs = [(t, other.optimizer[name][slot]) for name, state in one.optimizer.items() for slot, t in state.items()]
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert one.training == other.training


def test_two_processes_write_what_one_does(run_of_two: Path, tmp_path: Path) -> None:
    process_run.run(tmp_path, 2, "1f1b", 0, 2)
    one, two = tmp_path / "from-0-2" / "step-000002", run_of_two / "step-000002"
    assert faults_of(two) == []
    assert_same(load_snapshot(one), load_snapshot(two))
    assert load_snapshot(two).layout.stages == load_snapshot(one).layout.stages
    shards = [path.name for path in one.glob("stage-*")]
    assert len(shards) == 4
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in shards)


@pytest.mark.parametrize(("num_stages", "schedule"), [(2, "gpipe"), (3, "1f1b"), (7, "gpipe")])
def test_one_process_goes_on(run_of_two: Path, num_stages: int, schedule: str) -> None:
    process_run.run(run_of_two, num_stages, schedule, 2, 4)
    again = load_snapshot(run_of_two / f"from-2-{num_stages}" / "step-000004")
    assert_same(again, load_snapshot(run_of_two / "from-0-2" / "step-000004"))


def test_other_processes_go_on(run_of_two: Path) -> None:
    done = in_processes(4, run_of_two, 4, "gpipe", 2, 4)
    assert done.code == 0, done.outputs
    again = load_snapshot(run_of_two / "from-2-4" / "step-000004")
    assert_same(again, load_snapshot(run_of_two / "from-0-2" / "step-000004"))
    assert again.layout.num_ranks == 4


def test_rank_that_is_killed_while_it_saves(run_of_two: Path, tmp_path: Path) -> None:
    """Each save is two shards and what is said about them: the fifth file is the second shard of step 4."""
    done = in_processes(2, tmp_path, 2, "1f1b", 0, 4, 5)
    assert done.code != 0
    store = CheckpointStore(tmp_path / "from-0-2")
    assert store.steps() == [2]
    store.path_of(2).rename(tmp_path / "step-000002")
    process_run.run(tmp_path, 3, "1f1b", 2, 4)
    again = load_snapshot(tmp_path / "from-2-3" / "step-000004")
    assert_same(again, load_snapshot(run_of_two / "from-0-2" / "step-000004"))
