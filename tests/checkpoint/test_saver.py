"""Saves in the background: training goes on, the last good checkpoint stays, and nothing is lost in silence."""

import errno
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeloom.archive import attempt, durable
from pipeloom.archive.verify import faults_of
from pipeloom.checkpoint import CheckpointStore, Layout, Saver, Snapshot, load_snapshot
from pipeloom.checkpoint import saver as module
from pipeloom.checkpoint.parts import Part
from pipeloom.errors import CheckpointError, PipeloomWarning
from tests.archive.samples import RankThread, run_ranks, unsteady_disk

SIZE = 4_000


def snapshot(step_index: int, rank: int = 0) -> Snapshot:
    layout = Layout(2, 2, "1f1b", {rank: [f"{rank}.weight"]})
    weights = {f"{rank}.weight": torch.full((SIZE,), float(step_index))}
    return Snapshot(step_index, weights, {}, {"position": 8 * step_index}, layout=layout)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", num_kept=2)


class Gate:
    """A disk that writes nothing until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        write = Part.write

        def wait(part: Part, *rest: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(60)
            return write(part, *rest)

        monkeypatch.setattr(Part, "write", wait)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_training_may_change_what_is_being_saved(store: CheckpointStore, gate: Gate) -> None:
    with Saver(store) as saver:
        given = snapshot(1)
        saver.save(given)
        assert store.steps() == []
        given.model["0.weight"].fill_(9)
        gate.opened.set()
    assert saver.saved_step == 1
    assert load_snapshot(store.path_of(1)).model["0.weight"].tolist() == [1] * SIZE


def test_second_save_waits_for_the_first(store: CheckpointStore, gate: Gate) -> None:
    """Which checkpoints there are does not depend on the disk."""
    with Saver(CheckpointStore(store.folder, num_kept=9)) as saver:
        saver.save(snapshot(1))
        assert gate.reached.wait(60)
        threading.Timer(0.05, gate.opened.set).start()
        saver.save(snapshot(2))
        assert saver.saved_step == 1
        saver.save(snapshot(3))
    assert store.steps() == [1, 2, 3]
    assert saver.saved_step == 3


def test_memory_is_got_once_and_before_the_first_save(store: CheckpointStore) -> None:
    made: list[Snapshot] = []
    with Saver(store) as saver:
        for step_index in (1, 2):
            saver.prepare(lambda step=step_index: made.append(snapshot(step)) or made[-1])
        saver.save(snapshot(3))
    assert [each.step_index for each in made] == [1]
    assert load_snapshot(store.path_of(3)).model["0.weight"].tolist() == [3] * SIZE


def test_memory_is_not_written_into_while_it_is_being_saved(store: CheckpointStore) -> None:
    with Saver(CheckpointStore(store.folder, num_kept=99)) as saver:
        for step_index in range(1, 12):
            saver.save(snapshot(step_index))
    values = [load_snapshot(store.path_of(step)).model["0.weight"].unique().tolist() for step in store.steps()]
    assert values == [[step] for step in range(1, 12)]


def test_newest_are_kept(store: CheckpointStore) -> None:
    with Saver(store) as saver:
        for step_index in (1, 2, 3):
            saver.save(snapshot(step_index))
    assert names(store) == ["step-000002", "step-000003"]
    assert saver.failed_saves == 0


def full_disk(path: Path, pieces: Any) -> str:
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_failed_save_is_a_warning_and_a_number(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(store)
    saver.save(snapshot(1))
    saver.finish()
    with monkeypatch.context() as patch:
        patch.setattr("pipeloom.archive.shard.write_new", full_disk)
        saver.save(snapshot(2))
        with pytest.warns(PipeloomWarning, match=r"step-000002: .*No space left.*; training goes on, the last good"):
            saver.save(snapshot(3))
        saver._thread.join()
    with pytest.warns(PipeloomWarning, match="step-000003: .*No space left"):
        saver.poll()
    assert (saver.failed_saves, saver.saved_step) == (2, 1)
    assert names(store) == ["step-000001"]
    assert faults_of(store.path_of(1)) == []


def test_save_after_a_failed_one_is_as_any_other(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with Saver(store) as saver:
        with monkeypatch.context() as patch:
            patch.setattr("pipeloom.archive.shard.write_new", full_disk)
            saver.save(snapshot(1))
            saver._thread.join()
        with pytest.warns(PipeloomWarning, match="none was saved before"):
            saver.save(snapshot(2))
    assert (saver.failed_saves, saver.saved_step) == (1, 2)
    assert names(store) == ["step-000002"]


def test_failure_of_the_last_save_is_an_error(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.archive.shard.write_new", full_disk)
    saver = Saver(store)
    saver.save(snapshot(1))
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step-000001: .*No space left"):
        saver.finish()
    assert saver.failed_saves == 1


def test_folder_that_refuses_is_a_warning_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    saver = Saver(CheckpointStore(tmp_path / "file"))
    with pytest.warns(PipeloomWarning, match=r"file/step-000001: .*training goes on"):
        saver.save(snapshot(1))
    with pytest.raises(CheckpointError, match=r"file/step-000001"):
        saver.finish()


def test_step_that_is_there_already_is_an_error_at_once(store: CheckpointStore) -> None:
    store.save(snapshot(1))
    with pytest.raises(CheckpointError, match="step-000001 exists already"):
        Saver(store).save(snapshot(1))


def test_bug_in_the_background_is_raised_as_it_is(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Part, "write", fail)
    saver = Saver(store)
    saver.save(snapshot(1))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        saver.finish()
    assert names(store) == []


def test_copy_that_fails_leaves_nothing(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr("pipeloom.checkpoint.parts.Copies.of", fail)
    with pytest.raises(MemoryError, match="no memory"):
        Saver(store).save(snapshot(1))
    assert names(store) == []


def test_old_checkpoint_that_stays_is_a_warning(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr("pipeloom.checkpoint.store.keep_newest", fail)
    saver = Saver(store)
    saver.save(snapshot(1))
    with pytest.warns(PipeloomWarning, match="an old checkpoint cannot be removed: not yours"):
        saver.finish()
    assert (saver.failed_saves, saver.saved_step) == (0, 1)


def test_disk_that_is_gone_is_a_failed_save(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not even say whether the remains are away; that was "an old checkpoint", and counted for nothing."""
    with monkeypatch.context() as patch:

        def die(*_: Any) -> None:
            patch.setattr(Path, "exists", die)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr("pipeloom.archive.shard.write_new", die)
        saver = Saver(store)
        saver.save(snapshot(1))
        saver._thread.join()
    with pytest.warns(PipeloomWarning, match=r"step-000001: .*Input/output error; training goes on, none was saved"):
        saver.poll()
    assert (saver.failed_saves, saver.saved_step) == (1, None)


def test_name_that_may_not_last_keeps_the_old_ones(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new checkpoint was whole, but its name was perhaps not on the disk; the old one's removal was."""
    with Saver(CheckpointStore(store.folder, num_kept=1)) as saver:
        saver.save(snapshot(1))
        saver.finish()
        monkeypatch.setattr(attempt, "flush", unsteady_disk(store.folder))
        saver.save(snapshot(2))
        with pytest.warns(PipeloomWarning, match=r"step-000002 is whole, .* may undo its name: .*; no old one was"):
            saver.finish()
    assert (saver.failed_saves, saver.saved_step) == (0, 2)
    assert store.steps() == [1, 2]


def test_exception_in_training_waits_for_the_save(store: CheckpointStore, gate: Gate) -> None:
    def train() -> None:
        with Saver(store) as saver:
            saver.save(snapshot(1))
            threading.Timer(0.05, gate.opened.set).start()
            raise ZeroDivisionError("in a step")

    with pytest.raises(ZeroDivisionError, match="in a step"):
        train()
    assert store.steps() == [1]


def test_exception_does_not_wait_for_a_rank_that_died(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.01)

    def train(group: RankThread) -> None:
        with warnings.catch_warnings(), Saver(store, group, limit_s=0.5) as saver:
            if group.rank == 1:
                monkeypatch.setattr(saver, "_write", lambda *_: None)  # its part never comes
            saver.save(snapshot(1, group.rank))
            raise ConnectionError("rank 1 is gone")

    outcomes = run_ranks(2, train)
    assert [str(outcome) for outcome in outcomes] == ["rank 1 is gone"] * 2
    for thread in [each for each in threading.enumerate() if each.name == "checkpoint"]:
        thread.join()
    assert names(store) == []


def test_ranks_save_in_the_background_together(store: CheckpointStore) -> None:
    def run(group: RankThread) -> Any:
        with Saver(store, group) as saver:
            for step_index in (1, 2, 3):
                saver.save(snapshot(step_index, group.rank))
        return saver.saved_step, saver.failed_saves

    assert run_ranks(2, run) == [(3, 0), (3, 0)]
    assert names(store) == ["step-000002", "step-000003"]
    assert load_snapshot(store.path_of(3)).model.keys() == {"0.weight", "1.weight"}


def test_all_ranks_count_the_failure_of_one(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write_new = durable.write_new

    def fill_up(path: Path, pieces: Any) -> str:
        return (full_disk if path.name == "stage-001.safetensors" else write_new)(path, pieces)

    monkeypatch.setattr("pipeloom.archive.shard.write_new", fill_up)

    def run(group: RankThread) -> Any:
        saver = Saver(store, group)
        saver.save(snapshot(1, group.rank))
        with pytest.raises(CheckpointError, match="step-000001"):
            saver.finish()
        return saver.failed_saves

    assert run_ranks(2, run) == [1, 1]
    assert names(store) == []


LIMITED = """
import resource, sys, warnings, torch
from pathlib import Path
from pipeloom.checkpoint import CheckpointStore, Saver
from tests.checkpoint.test_saver import snapshot
store = CheckpointStore(Path(sys.argv[1]))
with Saver(store) as saver:
    saver.save(snapshot(1))
    saver._settle()
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, resource.RLIM_INFINITY))
    saver.save(snapshot(2))
    saver._settle()
    print(saver.failed_saves, saver.saved_step, flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saver.save(snapshot(3))
print(saver.failed_saves, saver.saved_step, sorted(path.name for path in store.folder.iterdir()))
"""


SLOW = """
import time
from pipeloom.checkpoint.parts import Part
write = Part.write
Part.write = lambda *rest: time.sleep(0.5) or write(*rest)
"""


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)


def test_file_that_may_not_grow_stops_the_save_and_not_the_training(tmp_path: Path) -> None:
    """The system itself refuses, in the middle of a shard."""
    done = run_script(LIMITED, tmp_path / "checkpoints")
    assert done.stdout.splitlines() == ["1 1", "1 3 ['step-000001', 'step-000003']"]
    assert "PipeloomWarning: cannot write the checkpoint" in done.stderr
    assert "File too large" in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("file systems may not be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_full_disk_stops_the_save_and_not_the_training(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    saver = Saver(store)
    saver.save(snapshot(1))
    saver._settle()
    saver.save(snapshot(2))
    with pytest.warns(PipeloomWarning, match=r"step-000002: .*No space left on device"):
        saver._settle()
    assert names(store) == ["step-000001"]
    assert faults_of(store.path_of(1)) == []


@pytest.fixture
def nobody() -> Iterator[None]:
    """A user who may write nowhere, if we are one who may write everywhere."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield
    if is_root:
        os.seteuid(0)


def test_folder_that_became_read_only_stops_the_save(store: CheckpointStore, request: pytest.FixtureRequest) -> None:
    store.save(snapshot(1))
    store.folder.chmod(0o500)
    saver = Saver(store)
    request.getfixturevalue("nobody")
    with pytest.warns(PipeloomWarning, match=r"step-000002: .*Permission denied"):
        saver.save(snapshot(2))
    assert saver.failed_saves == 1


def test_process_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    """Also if the disk is slower than what is left to do."""
    script = LIMITED.partition("with Saver")[0] + SLOW + "Saver(store).save(snapshot(1))"
    done = run_script(script, tmp_path / "checkpoints")
    assert (done.returncode, done.stderr) == (0, "")
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [1]
