"""A checkpoint is there whole or not at all, whoever of its writers fails."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeloom.archive import attempt as module
from pipeloom.archive import durable
from pipeloom.archive.attempt import Attempt, begin
from pipeloom.archive.manifest import Contents
from pipeloom.archive.verify import faults_of, verify_folder
from pipeloom.errors import CheckpointError
from tests.archive.samples import RankThread, finish, run_ranks, save, unsteady_disk, write_stage
from tests.archive.test_claim import overtake

FILES = ["manifest.json", "stage-000.optimizer.safetensors", "stage-000.safetensors", "training.json"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def failing(*stages: int) -> Callable[[Path, int, int], Contents]:
    def write(folder: Path, stage: int, step_index: int) -> Contents:
        contents = write_stage(folder, stage, step_index)
        if stage in stages:
            raise OSError(errno.ENOSPC, "No space left on device")
        return contents

    return write


def test_one_process_writes_all(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "step-000003", 3, stages=(0,))
    assert names(tmp_path) == ["step-000003"]
    assert names(checkpoint) == FILES


def test_ranks_write_one_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "step-000003"
    stages = [(0, 3), (1,), (2,)]
    outcomes = run_ranks(3, lambda group: save(target, 3, stages[group.rank], group))
    assert outcomes == [target] * 3
    assert names(tmp_path) == ["step-000003"]
    assert len(verify_folder(target).contents.files) == 9


def test_shards_do_not_depend_on_who_wrote_them(tmp_path: Path) -> None:
    alone, many = tmp_path / "alone", tmp_path / "many"
    save(alone, 3, stages=(0, 1, 2))
    run_ranks(3, lambda group: save(many, 3, (group.rank,), group))
    assert names(alone) == names(many)
    assert all((alone / name).read_bytes() == (many / name).read_bytes() for name in names(alone))


def test_stage_of_several_ranks_is_written_by_the_first(tmp_path: Path) -> None:
    begun: list[Attempt] = run_ranks(4, lambda group: begin(tmp_path / "a", 3, (group.rank % 2,), group))
    assert [attempt.own for attempt in begun] == [(0,), (1,), (), ()]
    assert {attempt.stages for attempt in begun} == {(0, 1)}
    assert len({attempt.folder for attempt in begun}) == 1
    begun[0].give_up(OSError("enough"))


def test_ranks_write_where_the_claim_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's claim took another name than its first, because somebody had that one's lock."""
    nonces = iter(["0badcafe", "600dcafe"])
    monkeypatch.setattr("pipeloom.archive.claim.secrets.token_hex", lambda _: next(nonces))
    held = overtake(monkeypatch, tmp_path / ".tmp-step-000003-0badcafe.lock")
    begun: list[Attempt] = run_ranks(2, lambda group: begin(tmp_path / "step-000003", 3, (group.rank,), group))
    assert [attempt.folder.name for attempt in begun] == [".tmp-step-000003-600dcafe"] * 2
    assert begun[0].folder.is_dir()
    os.close(held[0])
    begun[0].give_up(OSError("enough"))


def test_folder_is_absent_until_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "step-000001"
    seen: list[bool] = []

    def write(folder: Path, stage: int, step_index: int) -> Contents:
        seen.append(target.exists())
        return write_stage(folder, stage, step_index)

    finish(begin(target, 1, (0, 1)), 1, write)
    assert seen == [False, False]
    assert target.is_dir()


def test_everything_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, flushed = tmp_path / "step-000003", []

    def note(path: Path, *rest: Any) -> str:
        flushed.append((path.name.split("-")[0], target.exists()))
        return durable.write_new(path, *rest) if rest else ""

    monkeypatch.setattr(module, "write_new", note)
    monkeypatch.setattr(module, "flush", note)
    save(target, 3, stages=(0,))
    assert flushed == [
        ("part", False),
        ("training.json", False),
        ("manifest.json", False),
        (".tmp", False),
        (tmp_path.name.split("-")[0], True),
    ]


def test_existing_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "step-000003", 3)
    before = (checkpoint / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="step-000003 exists already; a checkpoint is never overwritten"):
        begin(checkpoint, 3, (0,))
    assert (checkpoint / "manifest.json").read_bytes() == before
    assert names(tmp_path) == ["step-000003"]


def test_ranks_at_different_steps_are_all_told(tmp_path: Path) -> None:
    outcomes = run_ranks(2, lambda group: begin(tmp_path / "a", 3 + group.rank, (group.rank,), group))
    assert [str(outcome).split(":")[0] for outcome in outcomes] == ["rank 0 saves step 3, rank 1 saves step 4"] * 2
    assert names(tmp_path) == []


def test_step_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step 3 cannot be saved as .*step-000004, which is the name of another"):
        begin(tmp_path / "step-000004", 3, (0,))
    assert names(tmp_path) == []


def test_place_that_refuses_is_heard_of_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    outcomes = run_ranks(2, lambda group: begin(tmp_path / "file" / "step-000001", 1, (group.rank,), group))
    assert [type(outcome) for outcome in outcomes] == [OSError, OSError]
    assert all("Not a directory" in str(outcome) or "File exists" in str(outcome) for outcome in outcomes)


def test_group_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    class Broken(RankThread):
        def all_gather(self, payload: bytes, what: str) -> list[bytes]:
            raise ConnectionError("rank 1 is gone")

    broken = Broken(0, [b"", b""], None)  # type: ignore[arg-type]
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        begin(tmp_path / "step-000001", 1, (0,), broken)
    assert names(tmp_path) == []


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_failure_of_any_rank_fails_all_and_leaves_nothing(tmp_path: Path, culprit: int) -> None:
    good = save(tmp_path / "step-000001", 1)

    def write(group: RankThread) -> Path:
        return finish(begin(tmp_path / "step-000002", 2, (group.rank,), group), 2, failing(culprit))

    outcomes = run_ranks(3, write)
    assert [type(outcome) for outcome in outcomes] == [CheckpointError] * 3
    assert "No space left on device" in str(outcomes[culprit])
    assert "No space left on device" in str(outcomes[0])
    assert names(tmp_path) == ["step-000001"]
    assert faults_of(good) == []


def test_rank_that_cannot_even_say_so_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    outcomes = run_ranks(
        2, lambda group: finish(begin(tmp_path / "step-000002", 2, (group.rank,), group), 2, failing(1))
    )
    assert [type(outcome) for outcome in outcomes] == [CheckpointError] * 2
    assert names(tmp_path) == []


def test_disk_that_answers_nothing_does_not_hide_the_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full, then gone; the error was of the attempt to tidy up, and the lock was never let go."""
    begun = begin(tmp_path / "step-000001", 1, (0,))

    def refuse(path: Path) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(CheckpointError, match=r"step-000001: .*No space left on device"):
        finish(begun, 1, failing(0))
    assert names(tmp_path) == []


def test_whole_checkpoint_is_one_for_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk refused to flush the new name. Rank 0 called that a failed save, rank 1 a good one: it was there."""
    target = tmp_path / "step-000003"
    monkeypatch.setattr(module, "flush", unsteady_disk(tmp_path))
    assert run_ranks(2, lambda group: save(target, 3, (group.rank,), group)) == [target] * 2
    assert faults_of(target) == []
    assert names(tmp_path) == ["step-000003"]


def test_rank_that_never_writes_is_waited_for_so_long(tmp_path: Path) -> None:
    def write(group: RankThread) -> Path | None:
        begun = begin(tmp_path / "step-000002", 2, (group.rank,), group, limit_s=0.05)
        return finish(begun, 2) if group.rank == 0 else None

    outcome, _ = run_ranks(2, write)
    assert "stages [1] were not written within 0.05 s" in str(outcome)
    assert names(tmp_path) == []


def test_rank_0_that_never_finishes_is_waited_for_so_long(tmp_path: Path) -> None:
    def write(group: RankThread) -> Any:
        begun = begin(tmp_path / "step-000002", 2, (group.rank,), group, limit_s=0.05)
        return finish(begun, 2) if group.rank == 1 else begun

    begun, outcome = run_ranks(2, write)
    assert "rank 0 did not finish it within 0.05 s" in str(outcome)
    begun.give_up(OSError("enough"))
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), KeyboardInterrupt("a signal")])
def test_what_is_no_fault_of_the_disk_is_raised_as_it_is(tmp_path: Path, error: BaseException) -> None:
    def write(folder: Path, stage: int, step_index: int) -> Contents:
        raise error

    with pytest.raises(type(error), match=str(error)):
        finish(begin(tmp_path / "step-000001", 1, (0,)), 1, write)
    assert names(tmp_path) == []


def test_remains_of_an_earlier_attempt_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-000001-0123abcd").mkdir()
    (tmp_path / ".tmp-step-000001-0123abcd" / "stage-000.safetensors").write_bytes(b"half")
    save(tmp_path / "step-000002", 2)
    assert names(tmp_path) == ["step-000002"]
