"""One file of all shards, that every program loads."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from pipeloom.checkpoint import Layout, Snapshot, merge_model, save_snapshot
from pipeloom.errors import CheckpointError


def tied_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False))
    model[2].weight = model[0].weight
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    layout = Layout(2, 1, "1f1b", {0: ["0.weight"], 1: ["2.weight"]})
    state = {"0.weight": {"exp_avg": torch.ones(6, 4)}}
    return save_snapshot(tmp_path / "step-000001", Snapshot(1, dict(tied_model().state_dict()), state, {}, (), layout))


def test_merged_file_is_a_plain_state_of_the_model(checkpoint: Path, tmp_path: Path) -> None:
    target, model = tmp_path / "model.safetensors", tied_model()
    assert merge_model(checkpoint, target) == 7
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    model.load_state_dict(load_file(target))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with safe_open(target, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_existing_file_is_never_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("precious")
    with pytest.raises(CheckpointError, match=r"model\.safetensors exists already; nothing is ever overwritten"):
        merge_model(checkpoint, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_text() == "precious"


def test_place_that_refuses_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write .*nowhere/model\.safetensors: .*No such file"):
        merge_model(checkpoint, tmp_path / "nowhere" / "model.safetensors")


def test_damaged_checkpoint_makes_no_file(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "stage-001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"stage-001\.safetensors is missing"):
        merge_model(checkpoint, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_what_is_no_tensor_stays_behind(tmp_path: Path) -> None:
    place = save_snapshot(tmp_path / "a", Snapshot(1, {"w": torch.ones(1), "_extra_state": {"a": 1}}, {}, {}))
    assert merge_model(place, tmp_path / "b") == 1
    assert load_file(tmp_path / "b").keys() == {"w"}
