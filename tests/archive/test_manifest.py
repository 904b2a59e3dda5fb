"""The manifest vouches for the other files, so nothing in it may be other than it was written."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.archive.manifest import MANIFEST, Contents, FileRecord, Manifest, TensorRecord, read_manifest
from pipeloom.errors import CheckpointError
from tests.archive.samples import flip_bit, reseal, save

CONTENTS = Contents(
    files={"stage-000.safetensors": FileRecord(8, "ab"), "stage-000.optimizer.safetensors": FileRecord(9, "cd")},
    model={"0.weight": TensorRecord("stage-000.safetensors", "float32", (2, 1))},
    optimizer={"step.0.weight": TensorRecord("stage-000.optimizer.safetensors", "float32", ())},
    tied={"5.weight": "0.weight"},
    values={"model": {"extra": {"$tuple": [1]}}, "optimizer": {}},
    groups=[{"names": ["0.weight"], "options": {"lr": 0.1}}],
    stages={"0": ["0.weight"]},
)
MADE = Manifest(200, {"num_stages": 1, "num_ranks": 1, "schedule": "1f1b"}, {"train": {"steps": 9}}, CONTENTS)
NUM_BYTES = len(MADE.as_bytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / MANIFEST).write_bytes(MADE.as_bytes())
    return tmp_path


def test_manifest_comes_back(folder: Path) -> None:
    assert read_manifest(folder) == MADE
    assert json.loads((folder / MANIFEST).read_bytes())["version"] == 2


@given(st.integers(0, NUM_BYTES - 1), st.integers(0, 7))
def test_every_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / MANIFEST).write_bytes(MADE.as_bytes())
    flip_bit(folder / MANIFEST, place, bit)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        read_manifest(folder)


@given(st.integers(0, NUM_BYTES - 1))
def test_every_truncation_is_noticed(tmp_path_factory: pytest.TempPathFactory, num_bytes: int) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / MANIFEST).write_bytes(MADE.as_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        read_manifest(folder)


def test_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest\.json: No such file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 3}, "says 'pipeloom-checkpoint' version 3; 'pipeloom-checkpoint' version 2 is needed"),
        ({"format": "other"}, "says 'other' version 2"),
        ({"format": None}, "says None version 2"),
    ],
)
def test_other_format_is_refused(folder: Path, change: dict[str, Any], says: str) -> None:
    reseal(folder, lambda value: value.update(change))
    with pytest.raises(CheckpointError, match=rf"manifest\.json {says}"):
        read_manifest(folder)


def test_first_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    old = {"format": "pipeloom-checkpoint", "version": 1, "files": {"model.safetensors": {"bytes": 8, "sha256": ""}}}
    (tmp_path / MANIFEST).write_text(json.dumps(old))
    with pytest.raises(CheckpointError, match=r"manifest\.json says 'pipeloom-checkpoint' version 1") as caught:
        read_manifest(tmp_path)
    assert "end that run with the sources that began it" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "manifest.json"])
def test_manifest_reaches_nothing_outside(folder: Path, name: str) -> None:
    reseal(folder, lambda value: value["files"].update({name: {"num_bytes": 1, "sha256": ""}}))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: it lists a file outside its folder"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("files", {}, "'0.weight' lies in no file that it lists"),
        ("tied", {"5.weight": "nothing"}, "'5.weight' lies in no file"),
        ("model", {"a": {"file": "stage-000.safetensors", "dtype": "object", "shape": []}}, "no dtype 'object'"),
        ("model", {"a": {"dtype": "float32"}}, "KeyError"),
        ("model", [], "AttributeError"),
        ("files", {"a": 3}, "TypeError"),
        ("files", {"a": {"num_bytes": "many", "sha256": ""}}, "invalid literal"),
        ("values", {}, "KeyError"),
        ("groups", [3], "TypeError"),
        ("stages", {"0": 3}, "TypeError"),
        ("step_index", None, "TypeError"),
        ("layout", 3, "TypeError"),
        ("layout", {}, "KeyError"),
        ("layout", {"num_stages": "x", "num_ranks": 1, "schedule": ""}, "invalid literal"),
    ],
)
def test_contents_that_lead_nowhere_are_refused(folder: Path, key: str, value: Any, fault: str) -> None:
    reseal(folder, lambda manifest: manifest.update({key: value}))
    with pytest.raises(CheckpointError, match=rf"manifest\.json is damaged: .*{fault}"):
        read_manifest(folder)


def test_parts_make_a_whole(tmp_path: Path) -> None:
    whole = read_manifest(save(tmp_path / "step-000003", 3, stages=(0, 1, 2))).contents
    assert whole.stages == {"0": ["0.weight"], "1": ["1.weight"], "2": ["2.weight"]}
    assert set(whole.tensors_of("stage-001.safetensors")) == {"1.weight"}
    assert set(whole.tensors_of("stage-001.optimizer.safetensors")) == {"exp_avg.1.weight"}
    assert len(whole.files) == 7
