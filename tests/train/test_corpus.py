"""Which text is read, and which of it is held out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import DataError
from pipeloom.train.corpus import is_held_out, load_corpus, read_documents, standard_library


def names_and_texts(*paths: Path) -> dict[str, bytes]:
    return {document.name: document.text for document in read_documents([str(path) for path in paths])}


def test_folder_is_read_in_order_with_relative_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("z.txt", "b/y.py", "a.md"):
        (tmp_path / name).write_text(name)
    assert list(names_and_texts(tmp_path)) == ["a.md", "z.txt", "b/y.py"]
    assert names_and_texts(tmp_path)["b/y.py"] == b"b/y.py"


def test_hidden_and_binary_files_of_a_folder_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text.txt").write_text("text")
    assert list(names_and_texts(tmp_path)) == ["text.txt"]
    assert names_and_texts(tmp_path / "image.png") == {"image.png": b"\x89PNG\0\0"}


def test_lines_of_jsonl_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one\\ntwo"}\n\n{"text": "dré", "id": 3}\n')
    assert names_and_texts(tmp_path / "a.jsonl") == {"a.jsonl:1": b"one\ntwo", "a.jsonl:3": "dré".encode()}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"text": ', "is not JSON: Expecting value"),
        ("plain words", "is not JSON"),
        ('["text"]', "has no text under the key 'text'"),
        ('{"txt": "a"}', "has no text under the key 'text'"),
        ('{"text": 3}', "has no text under the key 'text'"),
    ],
)
def test_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, fault: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "good"}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2 {fault}"):
        names_and_texts(tmp_path / "a.jsonl")


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the data path '.*/none\.txt': No such file"):
        names_and_texts(tmp_path / "none.txt")


@pytest.mark.parametrize("content", ["", None])
def test_no_text_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "empty.txt").write_text(content)
    with pytest.raises(DataError, match="there is no text in"):
        load_corpus([str(tmp_path)], 0.1, 4)


def test_text_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(DataError, match=r"held-out text .* has 10 bytes; .*sequence_length 10 .* need 11"):
        load_corpus([str(tmp_path)], 0.1, 10)


def test_split_is_by_whole_documents(text_folder: Path) -> None:
    corpus = load_corpus([str(text_folder)], 0.3, 16)
    texts = {name: text for name, text in names_and_texts(text_folder).items() if is_held_out(name, 0.3)}
    assert corpus.held_out.tobytes() == b"\n".join(texts.values())
    assert corpus.num_documents == (10 - len(texts), len(texts))
    assert all(text not in corpus.training.tobytes() for text in texts.values())


def test_added_file_moves_no_other(text_folder: Path) -> None:
    before = load_corpus([str(text_folder)], 0.3, 16)
    (text_folder / "new.txt").write_text("something new to read\n" * 5)
    after = load_corpus([str(text_folder)], 0.3, 16)
    assert sum(after.num_documents) == sum(before.num_documents) + 1
    assert before.held_out.tobytes() in after.held_out.tobytes()
    assert before.fingerprint != after.fingerprint


def test_split_does_not_depend_on_where_the_folder_is(text_folder: Path, tmp_path: Path) -> None:
    before = load_corpus([str(text_folder)], 0.3, 16)
    after = load_corpus([str(text_folder.rename(tmp_path / "elsewhere"))], 0.3, 16)
    assert after.fingerprint == before.fingerprint
    assert min(after.num_documents) > 0


def test_single_document_is_cut_in_two(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    corpus = load_corpus([str(tmp_path / "a.txt")], 0.2, 4)
    assert corpus.training.tobytes() + corpus.held_out.tobytes() == bytes(range(100))
    assert (len(corpus.held_out), corpus.num_documents) == (20, (1, 1))
    elsewhere = load_corpus([str(tmp_path / "a.txt")], 0.3, 4)
    assert elsewhere.fingerprint != corpus.fingerprint


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_larger_fraction_holds_out_more(name: str, smaller: float, larger: float) -> None:
    smaller, larger = sorted((smaller, larger))
    assert is_held_out(name, larger) or not is_held_out(name, smaller)
    assert not is_held_out(name, 0.0)


def test_fraction_is_met_on_many_documents() -> None:
    share = sum(is_held_out(f"module_{number}.py", 0.1) for number in range(10_000)) / 10_000
    assert share == pytest.approx(0.1, abs=0.01)


def test_standard_library_is_source_and_nothing_installed() -> None:
    names = [document.name for document in standard_library()]
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") and "site-packages" not in name for name in names)


def test_standard_library_is_the_same_in_another_process() -> None:
    code = (
        "from pipeloom.train.corpus import load_corpus; c = load_corpus((), 0.1, 128);"
        "print(c.fingerprint, *c.num_documents, (c.training == 0).sum())"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in "ab"
    }
    assert len(outputs) == 1
    assert int(outputs.pop().split()[1]) > 300
