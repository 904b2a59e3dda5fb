"""Files are on the disk, and JSON is refused by its name."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeloom.archive import durable
from pipeloom.archive.durable import json_bytes, read_json, sha256_of, write_new
from pipeloom.errors import CheckpointError


def test_checksum_is_that_of_the_file(tmp_path: Path) -> None:
    pieces = [b"head", bytes(range(256)) * 40_000, memoryview(b"tail")]
    digest = write_new(tmp_path / "file", pieces)
    whole = b"".join(pieces)
    assert (tmp_path / "file").read_bytes() == whole
    assert digest == sha256_of(tmp_path / "file") == hashlib.sha256(whole).hexdigest()


def test_file_is_flushed_before_the_checksum_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    write_new(tmp_path / "file", [b"x" * 100])
    assert sizes == [100]


def test_existing_file_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="file"):
        write_new(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_json_comes_back_with_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(json_bytes({"step": 3, "name": "é"}))
    value, content = read_json(tmp_path / "a.json")
    assert value == {"step": 3, "name": "é"}
    assert content == (tmp_path / "a.json").read_bytes()


def test_nan_does_not_become_bad_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes({"loss": float("nan")})


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is damaged: Expecting value"),
        (b"{", "is damaged: Expecting property name"),
        (b"[]", "is damaged: it holds no object"),
        (b"\xff\xfe\xff", "is damaged: "),
        (b'{"a":' * 100_000, "is damaged: maximum recursion depth"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "is damaged: Exceeds the limit"),
        (b"\x80\x04\x95\x0f\x00\x00\x00", "is damaged: "),
    ],
)
def test_damaged_json_is_named(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"a\.json {fault}"):
        read_json(tmp_path / "a.json")


def test_missing_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*a\.json: No such file"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a.json")
    with pytest.raises(CheckpointError, match=r"a\.json is damaged: it is no file"):
        read_json(tmp_path / "a.json")


def test_endless_json_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "MOST_JSON_BYTES", 1_000)
    (tmp_path / "a.json").write_bytes(b"[" + b"1," * 1_000)
    with pytest.raises(CheckpointError, match=r"a\.json is damaged: it has more than 1000 bytes"):
        read_json(tmp_path / "a.json")
