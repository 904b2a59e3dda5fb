"""A checkpoint's folder: whole or not at all, and no damage goes unnoticed."""

import json
from pathlib import Path

import pytest

from pipeloom.checkpoint import folder
from pipeloom.checkpoint.folder import MANIFEST, new_folder, read_json, verify_folder, write_json
from pipeloom.errors import CheckpointError


def write_checkpoint(target: Path) -> Path:
    with new_folder(target) as temporary:
        (temporary / "weights.bin").write_bytes(bytes(range(100)))
        write_json(temporary / "state.json", {"step": 3})
    return target


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "step-000003")


def test_finished_folder_verifies(checkpoint: Path) -> None:
    verify_folder(checkpoint)
    assert sorted(path.name for path in checkpoint.iterdir()) == [MANIFEST, "state.json", "weights.bin"]
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


def test_manifest_lists_sizes_and_checksums(checkpoint: Path) -> None:
    files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    assert files.keys() == {"state.json", "weights.bin"}
    assert files["weights.bin"]["bytes"] == 100
    assert len(files["weights.bin"]["sha256"]) == 64


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def write_half() -> None:
        with new_folder(tmp_path / "step-000001") as temporary:
            (temporary / "weights.bin").write_bytes(b"half")
            raise ZeroDivisionError("half way")

    with pytest.raises(ZeroDivisionError, match="half way"):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_folder_is_absent_until_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "step-000001"
    with new_folder(target) as temporary:
        assert not target.exists()
        assert temporary.name.startswith(".tmp-")
    assert target.is_dir()


def test_folder_without_its_manifest_never_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(folder, "_write_manifest", fail)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step-000003: the disk is full"):
        write_checkpoint(tmp_path / "step-000003")
    assert list(tmp_path.iterdir()) == []


def test_remains_of_a_crash_are_replaced(tmp_path: Path) -> None:
    remains = tmp_path / ".tmp-step-000003"
    remains.mkdir()
    (remains / "garbage.bin").write_bytes(b"half")
    checkpoint = write_checkpoint(tmp_path / "step-000003")
    verify_folder(checkpoint)
    assert not (checkpoint / "garbage.bin").exists()
    assert not remains.exists()


def test_existing_checkpoint_is_never_overwritten(checkpoint: Path) -> None:
    before = (checkpoint / MANIFEST).read_bytes()
    with pytest.raises(CheckpointError, match="exists already"), new_folder(checkpoint):
        pytest.fail("gave a folder to write into")
    assert (checkpoint / MANIFEST).read_bytes() == before


def test_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with (
        pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*file/step-000001"),
        new_folder(tmp_path / "file" / "step-000001"),
    ):
        pytest.fail("gave a folder to write into")


def test_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "weights.bin").unlink()
    with pytest.raises(CheckpointError, match=r"weights\.bin is missing"):
        verify_folder(checkpoint)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (bytes(range(60)), r"weights\.bin is truncated: 60 bytes, the manifest says 100"),
        (bytes(120), r"weights\.bin is too long: 120 bytes"),
        (bytes(100), r"weights\.bin is damaged: its SHA-256"),
    ],
)
def test_altered_file_is_named(checkpoint: Path, content: bytes, fault: str) -> None:
    (checkpoint / "weights.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=fault):
        verify_folder(checkpoint)


def test_every_single_flipped_bit_is_noticed(checkpoint: Path) -> None:
    original = (checkpoint / "weights.bin").read_bytes()
    for place in (0, 50, 99):
        flipped = bytearray(original)
        flipped[place] ^= 1
        (checkpoint / "weights.bin").write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"weights\.bin is damaged"):
            verify_folder(checkpoint)


def test_folder_without_manifest_is_no_checkpoint(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest\.json: No such file"):
        verify_folder(checkpoint)


@pytest.mark.parametrize(
    ("manifest", "fault"),
    [
        ("{", r"manifest\.json is damaged"),
        ("[]", r"manifest\.json is damaged: it holds no object"),
        ("{}", r"manifest\.json says None version None"),
        ('{"format": "pipeloom-checkpoint", "version": 2}', "version 2; this is 'pipeloom-checkpoint' version 1"),
        ('{"format": "pipeloom-checkpoint", "version": 1}', r"manifest\.json is damaged: KeyError"),
        ('{"format": "pipeloom-checkpoint", "version": 1, "files": {"a": 3}}', r"manifest\.json is damaged: TypeError"),
    ],
)
def test_damaged_manifest_is_named(checkpoint: Path, manifest: str, fault: str) -> None:
    (checkpoint / MANIFEST).write_text(manifest)
    with pytest.raises(CheckpointError, match=fault):
        verify_folder(checkpoint)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b"])
def test_manifest_reaches_nothing_outside(checkpoint: Path, name: str) -> None:
    manifest = read_json(checkpoint / MANIFEST)
    manifest["files"] = {name: {"bytes": 1, "sha256": ""}}
    write_json(checkpoint / MANIFEST, manifest)
    with pytest.raises(CheckpointError, match="lists a file outside its folder"):
        verify_folder(checkpoint)


def test_nan_does_not_become_bad_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "state.json", {"loss": float("nan")})


def test_everything_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, flushed = tmp_path / "step-000003", []
    monkeypatch.setattr(folder, "_flush", lambda path: flushed.append((path.name, target.exists())))
    write_checkpoint(target)
    files = ["state.json", "weights.bin", MANIFEST, ".tmp-step-000003"]
    assert flushed == [*((name, False) for name in files), (tmp_path.name, True)]
