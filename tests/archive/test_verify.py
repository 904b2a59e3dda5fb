"""Damage of every kind to every kind of file is refused by the file's name, and the newest good one is offered."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeloom.archive import verify
from pipeloom.archive.steps import folder_of
from pipeloom.archive.verify import faults_of, newest_good, offer_beside, verify_folder
from pipeloom.errors import CheckpointError
from tests.archive.samples import RankThread, flip_bit, reseal, run_ranks, save

SHARDS = ["stage-000.safetensors", "stage-001.optimizer.safetensors"]
FILES = [*SHARDS, "training.json", "manifest.json"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Checkpoints of two steps; step 200 is the one that is damaged."""
    for step_index in (100, 200):
        save(folder_of(tmp_path, step_index), step_index)
    return tmp_path


@pytest.fixture
def checkpoint(store: Path) -> Path:
    return folder_of(store, 200)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n ")


def zero_page(path: Path) -> None:
    content = path.read_bytes()
    page = content[-4096:]
    path.write_bytes(content[: -len(page)] + bytes(len(page)))


def assert_refused(checkpoint: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        verify_folder(checkpoint)
    assert len(faults_of(checkpoint)) == 1
    good, faults = newest_good(checkpoint.parent)
    assert good is not None
    assert good.step_index == 100
    assert len(faults) == 1


def test_finished_checkpoint_verifies(checkpoint: Path) -> None:
    assert verify_folder(checkpoint).step_index == 200
    assert faults_of(checkpoint) == []
    assert offer_beside(checkpoint) == (
        f"the newest good checkpoint beside it is {checkpoint}: continue from that one, --resume {checkpoint}"
    )


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [halve, lengthen, zero_page, Path.unlink, lambda path: path.write_bytes(b"")])
def test_damage_to_any_file_is_refused_by_its_name(
    checkpoint: Path, name: str, damage: Callable[[Path], object]
) -> None:
    damage(checkpoint / name)
    assert_refused(checkpoint, f"{name} is (damaged|truncated|too long|missing)|cannot read .*{name}")


@pytest.mark.parametrize("name", [*SHARDS, "training.json"])
@pytest.mark.parametrize(("damage", "word"), [(halve, "truncated"), (lengthen, "too long")])
def test_sizes_are_said(checkpoint: Path, name: str, damage: Callable[[Path], object], word: str) -> None:
    before = (checkpoint / name).stat().st_size
    damage(checkpoint / name)
    after = (checkpoint / name).stat().st_size
    assert_refused(checkpoint, f"{name} is {word}: {after} bytes, the manifest says {before}")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0, 9, 200, -1])
def test_flipped_bit_is_refused_by_the_files_name(checkpoint: Path, name: str, place: int) -> None:
    flip_bit(checkpoint / name, place % (checkpoint / name).stat().st_size)
    assert_refused(checkpoint, f"{name} (is damaged|is of step|is the shard of)")


@pytest.mark.parametrize("name", SHARDS)
def test_shards_of_two_steps_are_told_apart(store: Path, checkpoint: Path, name: str) -> None:
    assert (checkpoint / name).stat().st_size == (folder_of(store, 100) / name).stat().st_size
    shutil.copy(folder_of(store, 100) / name, checkpoint / name)
    assert_refused(checkpoint, f"{name} is of step 100, the manifest of step 200")


def test_swapped_stages_are_told_apart(checkpoint: Path) -> None:
    one, other = checkpoint / "stage-000.safetensors", checkpoint / "stage-001.safetensors"
    one.rename(checkpoint / "between")
    other.rename(one)
    (checkpoint / "between").rename(other)
    with pytest.raises(CheckpointError, match=r"stage-000\.safetensors is the shard of stage 1"):
        verify_folder(checkpoint)
    assert len(faults_of(checkpoint)) == 2


def test_training_state_of_another_step_is_refused(store: Path, checkpoint: Path) -> None:
    shutil.copy(folder_of(store, 100) / "training.json", checkpoint / "training.json")
    assert_refused(checkpoint, r"training\.json is damaged: its SHA-256")


def test_manifest_of_another_step_is_refused(store: Path, checkpoint: Path) -> None:
    shutil.copy(folder_of(store, 100) / "manifest.json", checkpoint / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json is of step 100, the folder of step 200"):
        verify_folder(checkpoint)


def test_manifest_of_another_cut_is_refused(store: Path, checkpoint: Path) -> None:
    other = save(store / "elsewhere", 200, stages=(0, 1, 2))
    shutil.copy(other / "manifest.json", checkpoint / "manifest.json")
    assert faults_of(checkpoint) == [
        f"{checkpoint / name} is missing, but the manifest lists it"
        for name in ("stage-002.safetensors", "stage-002.optimizer.safetensors")
    ]


def test_tensors_that_the_manifest_gives_another_form_are_refused(checkpoint: Path) -> None:
    reseal(checkpoint, lambda manifest: manifest["model"]["1.weight"].update(shape=[128, 64]))
    assert_refused(checkpoint, r"stage-001\.safetensors does not hold what the manifest says of '1\.weight'")


def test_step_of_the_training_state_must_be_the_manifests(store: Path) -> None:
    renamed = folder_of(store, 100).rename(store / "renamed")
    reseal(renamed, lambda manifest: manifest.update(step_index=7))
    assert faults_of(renamed)[-1] == f"{renamed / 'training.json'} is of step 100, the manifest of step 7"
    assert len(faults_of(renamed)) == 5


def test_what_the_manifest_does_not_list_is_not_looked_at(checkpoint: Path) -> None:
    (checkpoint / "stage-002.safetensors").write_bytes(b"notes of the user")
    assert faults_of(checkpoint) == []


def test_every_fault_is_named(checkpoint: Path) -> None:
    (checkpoint / "stage-000.safetensors").unlink()
    flip_bit(checkpoint / "stage-001.safetensors", -1)
    halve(checkpoint / "training.json")
    faults = faults_of(checkpoint)
    assert [any(name in fault for fault in faults) for name in ("stage-000.safe", "stage-001.safe", "training")] == [
        True
    ] * 3
    assert len(faults) == 3


def test_folder_for_a_file_is_a_missing_file(checkpoint: Path) -> None:
    (checkpoint / "training.json").unlink()
    (checkpoint / "training.json").mkdir()
    assert_refused(checkpoint, r"training\.json is missing")


def test_ranks_share_the_files_and_all_hear_of_a_fault(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    sha256_of = verify.sha256_of
    monkeypatch.setattr(verify, "sha256_of", lambda path: read.append(path.name) or sha256_of(path))
    flip_bit(checkpoint / "stage-001.safetensors", -1)
    outcomes = run_ranks(3, lambda group: verify_folder(checkpoint, group))
    assert [type(outcome) for outcome in outcomes] == [CheckpointError] * 3
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert sorted(read) == sorted([path.name for path in checkpoint.iterdir() if path.name != "manifest.json"])


def test_ranks_agree_on_the_newest_good_one(store: Path, checkpoint: Path) -> None:
    flip_bit(checkpoint / "stage-001.safetensors", -1)

    def newest(group: RankThread) -> int:
        good, faults = newest_good(store, group)
        assert good is not None
        return good.step_index + len(faults)

    assert run_ranks(2, newest) == [101, 101]


def test_nothing_good_is_said(store: Path, checkpoint: Path) -> None:
    for step_index in (100, 200):
        (folder_of(store, step_index) / "manifest.json").unlink()
    assert newest_good(store)[0] is None
    assert offer_beside(checkpoint) == "there is no good checkpoint beside it"
