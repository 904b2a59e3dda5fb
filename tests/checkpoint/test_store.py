"""Which checkpoint is continued from, which ones go, which ones are put aside."""

from pathlib import Path

import pytest
import torch

from pipeloom.checkpoint import CheckpointStore, Snapshot, load_snapshot, step_of
from pipeloom.errors import CheckpointError


def snapshot(step_index: int) -> Snapshot:
    return Snapshot(step_index, {"w": torch.full((2,), float(step_index))}, {}, {})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step_index in (100, 200, 300):
        store.save(snapshot(step_index), num_kept=10)
    return store


def damage(store: CheckpointStore, step_index: int) -> None:
    (store.path_of(step_index) / "model.safetensors").write_bytes(b"")


def test_newest_is_continued_from(store: CheckpointStore) -> None:
    latest, faults = store.latest_good()
    assert latest.step_index == 300
    assert faults == []


def test_damaged_one_is_passed_over_and_named(store: CheckpointStore) -> None:
    damage(store, 300)
    latest, faults = store.latest_good()
    assert latest.step_index == 200
    assert len(faults) == 1
    assert faults[0].message.startswith(str(store.path_of(300) / "model.safetensors"))


def test_all_damaged_names_every_fault(store: CheckpointStore) -> None:
    for step_index in store.steps():
        damage(store, step_index)
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint.*step-000300.*step-000200.*step-000100"):
        store.latest_good()


def test_empty_store_has_nothing_to_continue(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "nothing")
    assert store.steps() == []
    with pytest.raises(CheckpointError, match=r"there is no checkpoint to continue from in .*nothing"):
        store.latest_good()


@pytest.mark.parametrize(("num_kept", "left"), [(1, [400]), (2, [300, 400]), (9, [100, 200, 300, 400])])
def test_oldest_go_beyond_the_kept(store: CheckpointStore, num_kept: int, left: list[int]) -> None:
    path = store.save(snapshot(400), num_kept)
    assert path == store.path_of(400)
    assert store.steps() == left


def test_steps_ignore_what_is_no_checkpoint(store: CheckpointStore) -> None:
    for name in (".tmp-step-000400", "step-12", "step-abcdef", "set-aside-1", "notes"):
        (store.folder / name).mkdir()
    assert store.steps() == [100, 200, 300]


def test_steps_sort_as_numbers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step_index in (999_999, 1_000_000):
        store.save(snapshot(step_index), num_kept=5)
    assert store.steps() == [999_999, 1_000_000]
    assert step_of(store.path_of(1_000_000)) == 1_000_000


def test_later_ones_are_put_aside(store: CheckpointStore) -> None:
    aside = store.set_aside_after(100)
    assert store.steps() == [100]
    assert aside is not None
    assert CheckpointStore(aside).steps() == [200, 300]
    assert CheckpointStore(aside).latest_good()[0].model["w"].tolist() == [300, 300]


def test_nothing_later_makes_no_folder(store: CheckpointStore) -> None:
    before = sorted(store.folder.iterdir())
    assert store.set_aside_after(300) is None
    assert sorted(store.folder.iterdir()) == before


def test_second_branch_gets_its_own_folder(store: CheckpointStore) -> None:
    first = store.set_aside_after(200)
    store.save(snapshot(300), num_kept=10)
    second = store.set_aside_after(200)
    assert first != second
    assert CheckpointStore(store.folder / "set-aside-2").steps() == [300]


def test_what_a_crash_leaves_half_removed_is_no_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are all there yet, so only the manifest's absence tells."""

    def crash(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(f"the disk went away at {path.name}")

    monkeypatch.setattr("pipeloom.checkpoint.store.shutil.rmtree", crash)
    with pytest.raises(OSError, match="at step-000100"):
        store.save(snapshot(400), num_kept=2)
    assert (store.path_of(100) / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"cannot read .*step-000100.manifest\.json"):
        load_snapshot(store.path_of(100))
