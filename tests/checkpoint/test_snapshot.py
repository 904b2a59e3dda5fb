"""A snapshot comes back as it was, and only if all of it does."""

import pickle
from pathlib import Path

import pytest
import torch

from pipeloom.checkpoint import Snapshot, load_snapshot, save_snapshot
from pipeloom.errors import CheckpointError

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "training.json"]


def make_snapshot(step_index: int = 3) -> Snapshot:
    torch.manual_seed(step_index)
    weights = {"0.weight": torch.randn(4, 4), "1.running_mean": torch.randn(4)}
    moments = {"0.weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(4, 4)}}
    return Snapshot(step_index, weights, moments, {"position": 24, "config": {"train": {"steps": 6}}})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_snapshot(tmp_path / "step-000003", make_snapshot())
    return tmp_path / "step-000003"


def test_round_trip_is_bit_equal(saved: Path) -> None:
    loaded, made = load_snapshot(saved), make_snapshot()
    assert (loaded.step_index, loaded.training) == (3, made.training)
    assert all(torch.equal(loaded.model[name], made.model[name]) for name in made.model)
    slots, expected = loaded.optimizer["0.weight"], made.optimizer["0.weight"]
    assert slots.keys() == expected.keys()
    assert all(torch.equal(slots[name], expected[name]) for name in expected)


def test_folder_holds_safetensors_and_json_only(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == FILES


def test_loading_unpickles_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a pickle was read")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert load_snapshot(saved).step_index == 3


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_refused_by_name(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_snapshot(saved)


@pytest.mark.parametrize("name", FILES)
def test_truncated_file_is_refused_by_name(saved: Path, name: str) -> None:
    whole = (saved / name).read_bytes()
    (saved / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=name):
        load_snapshot(saved)


def test_optimizer_names_may_hold_dots(tmp_path: Path) -> None:
    state = {"a.b.c.weight": {"exp_avg": torch.ones(2)}}
    save_snapshot(tmp_path / "step-000001", Snapshot(1, {}, state, {}))
    assert load_snapshot(tmp_path / "step-000001").optimizer.keys() == {"a.b.c.weight"}


def test_optimizer_without_state_is_fine(tmp_path: Path) -> None:
    save_snapshot(tmp_path / "step-000000", Snapshot(0, {"w": torch.ones(1)}, {}, {}))
    assert load_snapshot(tmp_path / "step-000000").optimizer == {}


def test_step_index_must_be_there(tmp_path: Path) -> None:
    save_snapshot(tmp_path / "step-000001", Snapshot(1, {}, {}, {"step_index": None}))
    with pytest.raises(CheckpointError, match=r"training\.json has no step_index"):
        load_snapshot(tmp_path / "step-000001")
