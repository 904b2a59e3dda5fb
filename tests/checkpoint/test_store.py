"""Which checkpoint is continued from, which ones go, which ones are put aside."""

from pathlib import Path

import pytest
import torch

from pipeloom.archive import attempt
from pipeloom.checkpoint import CheckpointStore, Snapshot, save_snapshot
from pipeloom.errors import CheckpointError, PipeloomWarning
from tests.archive.samples import RankThread, run_ranks, unsteady_disk


def snapshot(step_index: int) -> Snapshot:
    return Snapshot(step_index, {"w": torch.full((2,), float(step_index))}, {}, {})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step_index in (100, 200, 300):
        store.save(snapshot(step_index), num_kept=10)
    return store


def damage(store: CheckpointStore, step_index: int) -> None:
    (store.path_of(step_index) / "stage-000.safetensors").write_bytes(b"")


def test_newest_is_continued_from(store: CheckpointStore) -> None:
    latest, faults = store.latest_good()
    assert latest.step_index == 300
    assert faults == []


def test_damaged_one_is_passed_over_and_named(store: CheckpointStore) -> None:
    damage(store, 300)
    latest, faults = store.latest_good()
    assert latest.step_index == 200
    assert len(faults) == 1
    assert faults[0].message.startswith(str(store.path_of(300) / "stage-000.safetensors"))


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


def test_store_knows_how_many_it_keeps(store: CheckpointStore) -> None:
    CheckpointStore(store.folder, num_kept=3).save(snapshot(400))
    assert store.steps() == [200, 300, 400]
    store.save(snapshot(500))
    assert store.steps() == [400, 500]


@pytest.mark.parametrize("num_kept", [0, -1])
def test_keeping_none_is_refused(num_kept: int) -> None:
    with pytest.raises(CheckpointError, match=f"num_kept={num_kept} was given; the newest checkpoint is always kept"):
        CheckpointStore(Path("store"), num_kept)


def test_existing_step_is_refused_and_nothing_goes(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="step-000300 exists already"):
        store.save(snapshot(300), num_kept=1)
    assert store.steps() == [100, 200, 300]


def test_place_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*file/step-000001: .*") as caught:
        CheckpointStore(tmp_path / "file").save(snapshot(1))
    assert "make room on the disk, or choose a folder" in str(caught.value.hint)


def test_name_that_may_not_last_keeps_the_old_ones(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new checkpoint was whole, but its name was perhaps not on the disk; the old one's removal was."""
    monkeypatch.setattr(attempt, "flush", unsteady_disk(store.folder))
    with pytest.warns(PipeloomWarning, match=r"step-000400 is whole, but .* undo its name: .*; no old one was removed"):
        assert store.save(snapshot(400), 1) == store.path_of(400)
    assert store.steps() == [100, 200, 300, 400]
    with pytest.warns(PipeloomWarning, match=r"a is whole, but a power failure may undo its name: .*error$"):
        save_snapshot(store.folder / "a", snapshot(1))


def test_old_checkpoint_that_stays_is_a_warning(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is good on all ranks, so it is no error on the one that removes."""

    def refuse(path: Path) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr("pipeloom.archive.steps.shutil.rmtree", refuse)
    with pytest.warns(PipeloomWarning, match="an old checkpoint cannot be removed: not yours"):
        store.save(snapshot(400))
    assert store.steps() == [100, 200, 300, 400]


def test_ranks_save_and_continue_together(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", num_kept=1)

    def run(group: RankThread) -> float:
        for step_index in (1, 2):
            store.save(snapshot(step_index), group=group)
        return float(store.latest_good(group)[0].model["w"][0])

    assert run_ranks(2, run) == [2.0, 2.0]
    assert [path.name for path in store.folder.iterdir()] == ["step-000002"]


def test_remains_are_removed_on_demand(store: CheckpointStore) -> None:
    (store.folder / ".tmp-step-000400-0123abcd").mkdir()
    store.remove_remains()
    assert sorted(path.name for path in store.folder.iterdir()) == [store.path_of(s).name for s in store.steps()]


def test_later_ones_are_put_aside(store: CheckpointStore) -> None:
    aside = store.set_aside_after(100)
    assert store.steps() == [100]
    assert aside is not None
    assert CheckpointStore(aside).latest_good()[0].model["w"].tolist() == [300, 300]
