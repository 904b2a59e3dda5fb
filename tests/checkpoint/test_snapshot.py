"""A snapshot comes back as it was, and only if all of it does."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeloom.archive.attempt import begin
from pipeloom.archive.manifest import MANIFEST
from pipeloom.checkpoint import Layout, Snapshot, load_snapshot, save_snapshot
from pipeloom.errors import CheckpointError
from tests.archive.samples import reseal

FILES = ["manifest.json", "stage-000.optimizer.safetensors", "stage-000.safetensors", "training.json"]


def make_snapshot(step_index: int = 3, **options: Any) -> Snapshot:
    torch.manual_seed(step_index)
    weights = {"0.weight": torch.randn(4, 4), "1.running_mean": torch.randn(4)}
    moments = {"0.weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(4, 4)}}
    return Snapshot(step_index, weights, moments, {"position": 24, "config": {"train": {"steps": 6}}}, **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_snapshot(tmp_path / "step-000003", make_snapshot())


def test_round_trip_is_bit_equal(saved: Path) -> None:
    loaded, made = load_snapshot(saved), make_snapshot()
    assert (loaded.step_index, loaded.training) == (3, made.training)
    assert all(torch.equal(loaded.model[name], made.model[name]) for name in made.model)
    slots, expected = loaded.optimizer["0.weight"], made.optimizer["0.weight"]
    assert slots.keys() == expected.keys()
    assert all(torch.equal(slots[name], expected[name]) for name in expected)


def test_folder_holds_safetensors_and_json_only(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == FILES


def test_configuration_and_layout_stand_in_the_manifest(tmp_path: Path) -> None:
    layout = Layout(2, 4, "gpipe", {0: ["0.weight"], 1: ["1.running_mean"]})
    manifest = json.loads((save_snapshot(tmp_path / "a", make_snapshot(layout=layout)) / MANIFEST).read_bytes())
    assert manifest["configuration"] == {"train": {"steps": 6}}
    assert manifest["layout"] == {"num_stages": 2, "num_ranks": 4, "schedule": "gpipe"}
    assert load_snapshot(tmp_path / "a").layout == layout


def test_loading_unpickles_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a pickle was read")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert load_snapshot(saved).step_index == 3


@pytest.mark.parametrize("name", FILES)
def test_damaged_file_is_refused_by_name_and_the_newest_good_one_offered(
    tmp_path: Path, saved: Path, name: str
) -> None:
    other = save_snapshot(tmp_path / "step-000002", make_snapshot(2))
    (saved / name).write_bytes((saved / name).read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=f"step-000003/{name}") as caught:
        load_snapshot(saved)
    assert str(caught.value.hint).endswith(f"beside it is {other}: continue from that one, --resume {other}")


class Runs:
    """A pickle of it would write a file."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize("name", FILES)
def test_pickle_in_disguise_runs_nothing(saved: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    evil = pickle.dumps(Runs())
    (saved / name).write_bytes(evil)
    if name != MANIFEST:
        record = {"num_bytes": len(evil), "sha256": __import__("hashlib").sha256(evil).hexdigest()}
        reseal(saved, lambda manifest: manifest["files"].update({name: record}))
    with pytest.raises(CheckpointError, match=name):
        load_snapshot(saved)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("configuration", {"$eval": "1"}),
        ("groups", [{"names": [], "options": {"$float": "x"}}]),
        ("values", {"model": {"0.weight": {"$tensor": ["ops", 1]}}, "optimizer": {}}),
    ],
)
def test_values_of_no_kind_are_refused(saved: Path, key: str, value: Any) -> None:
    reseal(saved, lambda manifest: manifest.update({key: value}))
    with pytest.raises(CheckpointError, match="step-000003 holds values that Pipeloom does not write"):
        load_snapshot(saved)


def test_only_what_is_asked_for_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_snapshot(saved, ["1.running_mean"])
    assert (loaded.model.keys(), loaded.optimizer) == ({"1.running_mean"}, {})
    loaded = load_snapshot(saved, ["0.weight", "7.unknown"])
    assert (loaded.model.keys(), loaded.optimizer.keys()) == ({"0.weight"}, {"0.weight"})


def test_what_is_no_tensor_comes_back_as_it_was(tmp_path: Path) -> None:
    model = {"0._extra_state": {"scales": (1.5, float("inf"))}}
    state = {"a.b.c.weight": {"exp_avg": torch.ones(2), "step": 7, "nesterov": None}}
    groups = [{"names": ["a.b.c.weight"], "options": {"betas": (0.9, 0.99), "lr": 0.1}}]
    save_snapshot(tmp_path / "a", Snapshot(1, model, state, {}, groups))
    loaded = load_snapshot(tmp_path / "a")
    assert (loaded.model, [*loaded.groups]) == (model, groups)
    assert {**loaded.optimizer["a.b.c.weight"], "exp_avg": 0} == {"exp_avg": 0, "step": 7, "nesterov": None}


def test_what_cannot_be_saved_is_named_before_anything_is_written(tmp_path: Path) -> None:
    state = {"0.weight": {"old_steps": [torch.ones(2)]}}
    with pytest.raises(CheckpointError, match=r"'old_steps.0.weight' of the optimizer\[0\] is of type Tensor"):
        save_snapshot(tmp_path / "a", Snapshot(1, {}, state, {}))
    with pytest.raises(CheckpointError, match="'reader' of the training state is of type Runs"):
        save_snapshot(tmp_path / "a", Snapshot(1, {}, {}, {"reader": Runs()}))
    assert list(tmp_path.iterdir()) == []


def test_nothing_at_all_is_fine(tmp_path: Path) -> None:
    loaded = load_snapshot(save_snapshot(tmp_path / "step-000000", Snapshot(0, {}, {}, {})))
    assert (loaded.step_index, loaded.model, loaded.optimizer, loaded.training) == (0, {}, {}, {})


def test_layout_of_a_pipeline_is_what_it_says(tmp_path: Path) -> None:
    says = {"num_stages": 2, "num_ranks": 2, "schedule": "1f1b", "stages": {1: ["3.weight"]}, "later": 1}
    assert Layout.of(SimpleNamespace(layout=says)) == Layout(2, 2, "1f1b", {1: ["3.weight"]})
    assert Layout.of(object()) == Layout(1, 1, "", {0: ()})


def test_folder_of_a_killed_save_is_not_in_the_way(tmp_path: Path) -> None:
    begun = begin(tmp_path / "step-000003", 3, (0,))
    with pytest.raises(CheckpointError, match=r"cannot read .*/manifest\.json: No such file"):
        load_snapshot(begun.folder)
    save_snapshot(tmp_path / "step-000003", make_snapshot())
    begun.give_up(OSError("enough"))
    assert load_snapshot(tmp_path / "step-000003").step_index == 3
