"""What lies in files is listed without reading, read one by one, and refused by the name of what is wrong."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from pipeloom.archive.shard import Form
from pipeloom.errors import CheckpointError
from pipeloom.weights.stored import INDEX, SINGLE, Weights

TENSORS = {
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "a.bias": torch.arange(3).to(torch.bfloat16),
    "number": torch.tensor(5),
    "waves": torch.arange(3).to(torch.complex64),
    "none": torch.empty(0, 4),
    "mask": torch.tensor([True, False, True]),
    "eighth": torch.arange(4).to(torch.float8_e4m3fn),
}


def sharded(folder, weight_map=None):
    """Two shards and their index."""
    names = sorted(TENSORS)
    files = {"one.safetensors": names[:3], "deep/two.safetensors": names[3:]}
    (folder / "deep").mkdir()
    for file, held in files.items():
        save_file({name: TENSORS[name] for name in held}, folder / file)
    weight_map = weight_map or {name: file for file, held in files.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def single(folder, name=SINGLE):
    save_file(TENSORS, folder / name)
    return folder


LAYOUTS = {
    "folder": single,
    "other name": lambda folder: single(folder, "adapter.safetensors"),
    "file": lambda folder: single(folder, "x.safetensors") / "x.safetensors",
    "shards": sharded,
    "index": lambda folder: sharded(folder) / INDEX,
    "text": lambda folder: str(sharded(folder)),
}


@pytest.mark.parametrize("lay", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_holds_the_same(lay, tmp_path):
    weights = Weights(lay(tmp_path))
    assert weights.forms == {
        name: Form(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in TENSORS.items()
    }
    for name, tensor in TENSORS.items():
        read = weights.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.cfloat(), tensor.cfloat())


def test_tensor_is_memory_of_its_own(tmp_path):
    weights = Weights(single(tmp_path))
    first = weights.read("a.weight")
    first.zero_()
    assert first.untyped_storage().nbytes() == 48
    assert torch.equal(weights.read("a.weight"), TENSORS["a.weight"])


def test_one_file_comes_before_an_index(tmp_path):
    sharded(tmp_path)
    save_file({"only": torch.ones(1)}, tmp_path / SINGLE)
    assert list(Weights(tmp_path).forms) == ["only"]


def test_large_tensor_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeloom.weights.stored._BESIDE_BYTES", 24)
    weights = Weights(single(tmp_path))
    for dtype in (None, torch.float64, torch.bfloat16):
        assert torch.equal(weights.read("a.weight", dtype), TENSORS["a.weight"].to(dtype))


def nothing(folder):
    return folder / "absent"


def two_without_index(folder):
    single(single(folder, "one.safetensors"), "two.safetensors")
    return folder


def cut(folder):
    path = single(folder) / SINGLE
    path.write_bytes(path.read_bytes()[:-1])
    return folder


def twice(folder):
    sharded(folder)
    save_file(
        {"mask": TENSORS["mask"], **{name: TENSORS[name] for name in ("a.bias", "a.weight", "eighth")}},
        folder / "one.safetensors",
    )
    return folder


def name_twice_in_index(folder):
    (sharded(folder) / INDEX).write_text('{"weight_map": {"mask": "one.safetensors", "mask": "deep/two.safetensors"}}')
    return folder


def pickled(folder):
    (folder / "pytorch_model.bin").write_bytes(b"")
    return folder


def no_format(folder):
    (folder / SINGLE).write_bytes(b"PK" * 40)
    return folder


def pointer_of_git_lfs(folder):
    (folder / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 123\n")
    return folder


def empty(folder):
    (folder / SINGLE).touch()
    return folder


def no_map(folder):
    (folder / INDEX).write_text('{"weights": {}}')
    return folder


def pointing(weight_map):
    return lambda folder: sharded(folder, weight_map)


FAULTS = {
    r"absent' does not exist\nhint: give a \.safetensors file, or a folder .*snapshot_download": nothing,
    r"has no \.safetensors file; model\.safetensors or model\.safetensors\.index\.json is needed": pickled,
    r"has 2 \.safetensors files without an index": two_without_index,
    r"model\.safetensors cannot be read as safetensors: its tensors have \d+ bytes, the file has room for \d+": cut,
    r"tensor 'mask' is in two files, .*two\.safetensors and .*one\.safetensors": twice,
    r"index\.json has the name 'mask' twice": name_twice_in_index,
    r"model\.safetensors cannot be read as safetensors: its header would have": no_format,
    r"model\.safetensors cannot be read as safetensors: it is not the file, but .*: git lfs pull": pointer_of_git_lfs,
    r"model\.safetensors cannot be read as safetensors: it has 0 bytes": empty,
    r"index\.json is no index of weights: it has no 'weight_map'": no_map,
    r"index\.json names 'three\.safetensors', which is missing\nhint: get": pointing({"a.bias": "three.safetensors"}),
    r"index\.json names a file outside its folder: '\.\./x\.safetensors'": pointing({"a.bias": "../x.safetensors"}),
    r"names a file outside its folder: '/etc/x'": pointing({"a.bias": "/etc/x"}),
    r"names a file outside its folder: 'deep\\\\two'": pointing({"a.bias": "deep\\two"}),
    r"the index says that 'b\.bias' is in .*one\.safetensors; it is not": pointing({"b.bias": "one.safetensors"}),
}


@pytest.mark.parametrize("text", FAULTS)
def test_fault_is_named(text, tmp_path):
    with pytest.raises(CheckpointError, match=text):
        Weights(FAULTS[text](tmp_path))


def test_unknown_name_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tensor 'a\.wait'\nhint: did you mean 'a\.weight'"):
        Weights(single(tmp_path)).read("a.wait")


def test_file_that_is_cut_later_is_noticed(tmp_path):
    weights = Weights(single(tmp_path))
    with (tmp_path / SINGLE).open("r+b") as file:
        file.truncate((tmp_path / SINGLE).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends within '.*': it was cut since it was opened"):
        [weights.read(name) for name in TENSORS]


def test_file_that_goes_away_is_named(tmp_path):
    weights = Weights(single(tmp_path))
    (tmp_path / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=rf"cannot read {re.escape(str(tmp_path))}.*: No such file"):
        weights.read("mask")
