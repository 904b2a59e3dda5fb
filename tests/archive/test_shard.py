"""A shard is a safetensors file: the library reads what is written here, and tricks are refused by both."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from pipeloom.archive.shard import DTYPES, Form, read_header, write_shard
from pipeloom.errors import CheckpointError

FORMS = st.builds(Form, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3).map(tuple))
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "__metadata__")


def tensor(form: Form) -> tuple[Form, memoryview]:
    return form, memoryview(bytes(place % 256 for place in range(form.num_bytes)))


@given(st.dictionaries(NAMES, FORMS, max_size=5))
def test_the_library_reads_what_is_written(tmp_path_factory: pytest.TempPathFactory, forms: dict[str, Form]) -> None:
    path = tmp_path_factory.mktemp("shard") / "a.safetensors"
    num_bytes, _ = write_shard(path, {name: tensor(form) for name, form in forms.items()}, {"stage": "3"})
    assert path.stat().st_size == num_bytes
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"stage": "3"}
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        read = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    assert read == {name: (DTYPES[form.dtype][0], form.shape) for name, form in forms.items()}


@given(st.dictionaries(NAMES, FORMS, max_size=5))
def test_header_comes_back(tmp_path_factory: pytest.TempPathFactory, forms: dict[str, Form]) -> None:
    path = tmp_path_factory.mktemp("shard") / "a.safetensors"
    write_shard(path, {name: tensor(form) for name, form in forms.items()}, {"step_index": "7", "stage": "3"})
    header = read_header(path)
    assert header.forms == forms
    assert header.metadata == {"step_index": "7", "stage": "3"}


@given(st.permutations(["bool", "float32", "bfloat16", "int64", "uint8"]))
def test_tensors_lie_at_multiples_of_their_width(tmp_path_factory: pytest.TempPathFactory, order: list[str]) -> None:
    path = tmp_path_factory.mktemp("shard") / "a.safetensors"
    write_shard(path, {name: tensor(Form(name, (3,))) for name in order}, {})
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    fields = json.loads(path.read_bytes()[8 : 8 + length])
    assert length % 8 == 0
    assert all(fields[name]["data_offsets"][0] % DTYPES[name][1] == 0 for name in order)


def test_equal_tensors_make_equal_files(tmp_path: Path) -> None:
    one, two = {"a": tensor(Form("float32", (3,))), "b": tensor(Form("bool", (2, 2)))}, {}
    for name in reversed(one):
        two[name] = one[name]
    sums = [
        write_shard(tmp_path / "1", one, {"x": "1", "y": "2"}),
        write_shard(tmp_path / "2", two, {"y": "2", "x": "1"}),
    ]
    assert sums[0] == sums[1]
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_form_reads_as_torch_writes_it() -> None:
    assert str(Form("float32", (4, 2))) == "float32[4, 2]"
    assert (Form("bfloat16", (3, 5)).num_bytes, Form("float64", ()).num_bytes) == (30, 8)


def field(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TRICKS = {
    "empty file": (b"", "it has 0 bytes, and 8 of them"),
    "pickle": (b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94", "its header would have"),
    "huge header": (struct.pack("<Q", 2**63) + b"{}", "its header would have 9223372036854775808 bytes"),
    "header beyond the end": (struct.pack("<Q", 99) + b"{}", "its header would have 99 bytes"),
    "no JSON": (b"[" * 100, "recursion|Expecting"),
    "deep JSON": (b'{"a":' * 90_000, "recursion"),
    "a list": ([], "pop"),
    "overlap": ({"a": field(), "b": field()}, "the place of 'b' in it"),
    "gap": ({"a": field(offsets=(4, 8))}, "the place of 'a' in it"),
    "more bytes than tensors": ({"a": field(offsets=(0, 4))}, "its tensors have 4 bytes, the file has room for 8"),
    "fewer bytes than tensors": ({"a": field(shape=(9,), offsets=(0, 36))}, "its tensors have 36 bytes"),
    "backwards": ({"a": field(offsets=(4, 0))}, "the place of 'a' in it"),
    "negative size": ({"a": field(shape=(-1,))}, "the place of 'a' in it"),
    "more than there is": ({"a": field(shape=(2**40, 2**40))}, "the place of 'a' in it"),
    "other dtype": ({"a": field("Q4")}, "Q4"),
    "no fields": ({"a": 3}, "not subscriptable"),
    "text for offsets": ({"a": field(offsets="08")}, "the place of 'a' in it"),
    "metadata that is none": ({"__metadata__": 3}, "items"),
}


def written(trick: str, path: Path) -> Path:
    content, _ = TRICKS[trick]
    if not isinstance(content, bytes):
        text = json.dumps(content).encode()
        content = struct.pack("<Q", len(text)) + text + bytes(8)
    elif trick in ("no JSON", "deep JSON"):
        content = struct.pack("<Q", len(content)) + content
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("trick", TRICKS)
def test_tricks_of_a_header_are_refused_by_the_files_name(tmp_path: Path, trick: str) -> None:
    path = written(trick, tmp_path / "stage-000.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"stage-000\.safetensors cannot be read as safetensors: .*({TRICKS[trick][1]})"
    ):
        read_header(path)


@pytest.mark.parametrize("trick", TRICKS)
def test_the_library_refuses_them_too(tmp_path: Path, trick: str) -> None:
    with pytest.raises(SafetensorError, match="header"):
        safe_open(written(trick, tmp_path / "a"), framework="np")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*stage-000\.safetensors: No such file"):
        read_header(tmp_path / "stage-000.safetensors")
