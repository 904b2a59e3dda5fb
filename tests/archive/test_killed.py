"""kill -9 at any moment of a save: what was good stays good, what is there is whole, and what is left over goes."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom.archive.steps import folder_of
from pipeloom.archive.verify import faults_of, newest_good
from tests.archive import samples
from tests.archive.samples import save

# One process brings eleven things to the disk: two shards and a part for each of two stages, the training state, the
# manifest, the folder, and, when it has its name, the folder around it.
MOMENTS = range(1, 11)
NAMED_AT = 10


def start(store: Path, rank: int = 0, num_ranks: int = 1, moment: int = 0, limit_s: float = 600) -> subprocess.Popen:
    command = [sys.executable, samples.__file__, *map(str, (store, 200, rank, num_ranks, moment, limit_s))]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "checkpoints"
    save(folder_of(store, 100), 100)
    return store


def newest_step(store: Path) -> int:
    good, _ = newest_good(store)
    assert good is not None
    return good.step_index


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_save_leaves_the_last_good_one(store: Path, moment: int) -> None:
    with start(store, moment=moment) as process:
        process.communicate()
    assert process.returncode == -9
    assert newest_step(store) == (200 if moment >= NAMED_AT else 100)
    assert faults_of(folder_of(store, 100)) == []
    save(folder_of(store, 300), 300)
    assert [path.name for path in store.iterdir() if path.name.startswith(".")] == []


def test_moments_are_all_that_there_are(store: Path) -> None:
    with start(store, moment=MOMENTS[-1] + 1) as process:
        assert process.communicate() == (None, "")
    assert process.returncode == 0
    assert newest_step(store) == 200


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_second_writer_is_killed(store: Path, moment: int) -> None:
    """The first one waits no longer than it may, says which stage is missing, and leaves nothing behind."""
    with start(store, 0, 2, limit_s=1) as first, start(store, 1, 2, moment) as second:
        _, said = first.communicate()
    assert (first.returncode, second.returncode) == (1, -9)
    assert "step-000200: stages [1] were not written within 1 s" in said
    assert newest_step(store) == 100
    assert sorted(path.name for path in store.iterdir()) == ["step-000100"]


@pytest.mark.parametrize("moment", [1, 4, 6])
def test_first_writer_is_killed(store: Path, moment: int) -> None:
    """It is the one that cleans up, so what it leaves goes at the next save."""
    with start(store, 0, 2, moment) as first, start(store, 1, 2, limit_s=1) as second:
        _, said = second.communicate()
    assert (first.returncode, second.returncode) == (-9, 1)
    assert "rank 0 did not finish it within 1 s" in said
    assert newest_step(store) == 100
    save(folder_of(store, 300), 300)
    assert sorted(path.name for path in store.iterdir()) == ["step-000100", "step-000300"]


def test_two_processes_write_one_checkpoint(store: Path) -> None:
    with start(store, 0, 2) as first, start(store, 1, 2) as second:
        assert (first.communicate()[1], second.communicate()[1]) == ("", "")
    assert faults_of(folder_of(store, 200)) == []
    assert newest_step(store) == 200
