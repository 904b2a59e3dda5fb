"""Named tensors come back with their bits, and with what they share."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeloom.checkpoint.tensors import load_tensors, save_tensors
from pipeloom.errors import CheckpointError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_keeps_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = (torch.randn(3, 4) * 100).to(dtype)
    save_tensors(tmp_path / "a.safetensors", {"x": tensor})
    loaded = load_tensors(tmp_path / "a.safetensors")["x"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor)


@given(st.dictionaries(st.text(min_size=1), st.lists(st.integers(0, 3), max_size=3), max_size=4))
def test_any_names_and_shapes_round_trip(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]]
) -> None:
    tensors = {name: torch.randn(shape) for name, shape in shapes.items() if name.isprintable()}
    path = tmp_path_factory.mktemp("tensors") / "a.safetensors"
    save_tensors(path, tensors)
    loaded = load_tensors(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_special_values_survive(tmp_path: Path) -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    save_tensors(tmp_path / "a.safetensors", {"x": tensor})
    loaded = load_tensors(tmp_path / "a.safetensors")["x"]
    assert loaded.view(torch.int32).tolist() == tensor.view(torch.int32).tolist()


def test_tied_parameter_is_written_once(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    save_tensors(tmp_path / "tied.safetensors", {"embedding.weight": weight, "head.weight": weight})
    save_tensors(tmp_path / "one.safetensors", {"embedding.weight": weight})
    loaded = load_tensors(tmp_path / "tied.safetensors")
    assert loaded["head.weight"] is loaded["embedding.weight"]
    assert (tmp_path / "tied.safetensors").stat().st_size < 1.1 * (tmp_path / "one.safetensors").stat().st_size


def test_equal_tensors_make_equal_files(tmp_path: Path) -> None:
    weight = torch.randn(3)
    for number in range(10):
        save_tensors(tmp_path / f"plain-{number}", {"a": weight, "b": weight + 1})
        save_tensors(tmp_path / f"tied-{number}", {"a": weight, "b": weight})
    assert len({path.read_bytes() for path in tmp_path.glob("plain-*")}) == 1
    assert len({path.read_bytes() for path in tmp_path.glob("tied-*")}) == 1


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[1:], lambda x: x[:, ::2], lambda x: x[0].expand(5, 4)])
def test_views_are_saved_without_their_base(tmp_path: Path, view) -> None:
    base = torch.arange(16.0).reshape(4, 4)
    save_tensors(tmp_path / "a.safetensors", {"base": base, "view": view(base)})
    loaded = load_tensors(tmp_path / "a.safetensors")
    assert torch.equal(loaded["view"], view(base))
    assert torch.equal(loaded["base"], base)


def test_empty_tensors_are_not_taken_for_tied(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a.safetensors", {"x": torch.empty(0, 3), "y": torch.empty(0, 5)})
    loaded = load_tensors(tmp_path / "a.safetensors")
    assert loaded["x"].shape == (0, 3)
    assert loaded["y"].shape == (0, 5)


def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere/model\.safetensors cannot be written: "):
        save_tensors(tmp_path / "nowhere" / "model.safetensors", {"x": torch.ones(1)})


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04pickle", b"\xff" * 64])
def test_other_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as safetensors"):
        load_tensors(tmp_path / "model.safetensors")
