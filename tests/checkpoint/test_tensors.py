"""Tensors as bytes and back, to the bit."""

from pathlib import Path

import pytest
import torch

from pipeloom.archive.shard import write_shard
from pipeloom.checkpoint.tensors import bytes_of, form_of, identity_of, read_tensors
from pipeloom.errors import CheckpointError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def through_file(path: Path, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    write_shard(path, {name: (form_of(t, name), bytes_of(t)) for name, t in tensors.items()}, {})
    return read_tensors(path, tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0, 3)])
def test_round_trip_keeps_every_bit(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    loaded = through_file(tmp_path / "a.safetensors", x=tensor)["x"]
    assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
    assert bytes_of(loaded) == bytes_of(tensor)


def test_special_values_survive(tmp_path: Path) -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    loaded = through_file(tmp_path / "a.safetensors", x=tensor)["x"]
    assert loaded.view(torch.int32).tolist() == tensor.view(torch.int32).tolist()


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[1:], lambda x: x[:, ::2], lambda x: x[0].expand(5, 4)])
def test_views_are_saved_without_their_base(tmp_path: Path, view) -> None:
    base = torch.arange(16.0).reshape(4, 4)
    loaded = through_file(tmp_path / "a.safetensors", base=base, view=view(base))
    assert torch.equal(loaded["view"], view(base))
    assert torch.equal(loaded["base"], base)


def test_gradients_and_views_of_conjugates_do_not_matter(tmp_path: Path) -> None:
    tensor = torch.randn(3, dtype=torch.complex64, requires_grad=True).conj()
    assert torch.equal(through_file(tmp_path / "a.safetensors", x=tensor)["x"], tensor.detach())


def test_contiguous_values_are_not_copied() -> None:
    tensor = torch.zeros(4)
    content = bytes_of(tensor)
    tensor.fill_(1)
    assert bytes(content) == bytes(bytes_of(torch.ones(4)))


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, 2).to_sparse(), "float32, sparse_coo"),
        (torch.zeros(2, device="meta"), "on the meta device"),
    ],
)
def test_tensor_that_has_no_plain_bytes_is_refused_by_name(tensor: torch.Tensor, what: str) -> None:
    with pytest.raises(CheckpointError, match=f"'0.weight' is a tensor that cannot be saved: {what}") as caught:
        form_of(tensor, "0.weight")
    assert "float64, float32" in str(caught.value.hint)


def test_same_memory_is_the_same_tensor_only_if_it_is_seen_alike() -> None:
    base = torch.zeros(4, 4)
    same = [identity_of(name, base) for name in ("a", "b")]
    assert same[0] == same[1]
    assert len({identity_of("a", each) for each in (base, base.t(), base[:2], base.view(2, 8), base + 0)}) == 5
    assert identity_of("a", torch.empty(0)) != identity_of("b", torch.empty(0))


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04pickle", b"\xff" * 64])
def test_other_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "stage-000.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"stage-000\.safetensors cannot be read as safetensors"):
        read_tensors(tmp_path / "stage-000.safetensors", ["x"])


def test_tensor_that_is_not_there_is_refused(tmp_path: Path) -> None:
    through_file(tmp_path / "a.safetensors", x=torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read as safetensors: .*y"):
        read_tensors(tmp_path / "a.safetensors", ["y"])
