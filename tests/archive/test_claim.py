"""Remains of the dead go, what somebody writes at the moment stays."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom.archive.claim import Claim, remove_remains

CLAIMS = """
import pathlib, sys, time
from pipeloom.archive.claim import Claim
claim = Claim(pathlib.Path(sys.argv[1]), "0badcafe")
(claim.folder / "stage-000.safetensors").write_bytes(b"half")
print("claimed", flush=True)
time.sleep(600)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_claim_that_is_let_go_leaves_no_lock(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "step-000001", "0badcafe")
    assert names(tmp_path) == [".tmp-step-000001-0badcafe", ".tmp-step-000001-0badcafe.lock"]
    claim.folder.rename(claim.target)
    claim.release()
    claim.release()
    assert names(tmp_path) == ["step-000001"]


def test_killed_processs_folder_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIMS, str(tmp_path / "step-000001")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        remove_remains(tmp_path)
        assert (tmp_path / ".tmp-step-000001-0badcafe" / "stage-000.safetensors").exists()
        process.kill()
        process.wait()
    remove_remains(tmp_path)
    assert names(tmp_path) == []


def overtake(monkeypatch: pytest.MonkeyPatch, lock: Path) -> list[int]:
    """As soon as somebody is about to lock this file, another one has it; returns that one's descriptor, then."""
    flock, held = fcntl.flock, list[int]()

    def second(descriptor: int, operation: int) -> None:
        if lock.exists() and not held:
            held.append(os.open(lock, os.O_RDWR))
            flock(held[0], operation)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", second)
    return held


def test_claim_whose_lock_another_one_has_takes_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal of remains locked the new file before its owner did; the next one removed what was being saved."""
    held = overtake(monkeypatch, tmp_path / ".tmp-step-000001-0badcafe.lock")
    claim = Claim(tmp_path / "step-000001", "0badcafe")
    (overtaker,) = held
    os.close(overtaker)
    remove_remains(tmp_path)
    assert claim.nonce != "0badcafe"
    assert names(tmp_path) == [claim.folder.name, f"{claim.folder.name}.lock"]
    claim.release()


def test_locks_that_others_always_have_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=r"another process holds the lock of each new folder beside .*step-000001"):
        Claim(tmp_path / "step-000001", "0badcafe")
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_own_folder_stays(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "step-000001", "0badcafe")
    remove_remains(tmp_path)
    assert claim.folder.is_dir()
    claim.release()


@pytest.mark.parametrize("name", [".tmp-step-000003", ".tmp-step-000003-0123abcd", ".tmp-step-1000000-0123abcd"])
def test_remains_go_with_and_without_lock(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "garbage").write_bytes(b"half")
    (tmp_path / f".tmp-step-000009-{'0' * 8}.lock").touch()
    remove_remains(tmp_path)
    assert names(tmp_path) == []


def test_what_others_call_temporary_stays(tmp_path: Path) -> None:
    kept = [".tmp-notes", ".tmp-best-0123abcd", "step-000001", "tmp-step-000003"]
    for name in kept:
        (tmp_path / name).mkdir()
    remove_remains(tmp_path, "other")
    assert names(tmp_path) == sorted(kept)
    remove_remains(tmp_path, "best")
    assert names(tmp_path) == sorted(set(kept) - {".tmp-best-0123abcd"})


def test_without_locks_nothing_is_removed_and_claims_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    claim = Claim(tmp_path / "step-000001", "0badcafe")
    remove_remains(tmp_path)
    assert claim.folder.is_dir()


def test_place_that_refuses_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-000001-0badcafe").mkdir()
    with pytest.raises(FileExistsError, match="0badcafe"):
        Claim(tmp_path / "step-000001", "0badcafe")
    assert names(tmp_path) == [".tmp-step-000001-0badcafe"]
