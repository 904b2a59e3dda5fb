"""Text from files, split into what is trained on and what is held out.

Splitting one long string at 90 % holds out whatever happens to be last. Here whole documents (a file, or a
line of a .jsonl file) are held out, chosen by a hash of their relative path: adding a file moves no other
one to the other side.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import DataError

Bytes = NDArray[np.uint8]


class Document(NamedTuple):
    """A text and the relative path by which it is known on every machine."""

    name: str
    text: bytes


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text.

    Attributes:
        training: 1-d uint8, documents joined by newlines.
        held_out: likewise.
        num_documents: (training, held out); a corpus of one document is cut in two, (1, 1).
        fingerprint: SHA-256 of both; a checkpoint's place in the data means nothing in another text.
    """

    training: Bytes
    held_out: Bytes
    num_documents: tuple[int, int]
    fingerprint: str


def load_corpus(paths: Sequence[str], held_out_fraction: float, sequence_length: int) -> Corpus:
    """Read and split the text of ``paths``, or of Python's standard library if there are none.

    Raises:
        DataError: a path that does not exist or cannot be read, a line of a .jsonl file that is no object
            with the key `text`, or less text than one window on either side.
    """
    documents = list(read_documents(paths) if paths else standard_library())
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for document in documents:
        sides[is_held_out(document.name, held_out_fraction)].append(document.text)
    if not all(sides):
        text = b"\n".join(document.text for document in documents)
        border = len(text) - int(len(text) * held_out_fraction)
        sides = ([text[:border]], [text[border:]])
    training, held_out = (b"\n".join(side) for side in sides)
    _check_enough({"training": training, "held-out": held_out}, paths, sequence_length)
    return Corpus(
        np.frombuffer(training, np.uint8),
        np.frombuffer(held_out, np.uint8),
        (len(sides[0]), len(sides[1])),
        hashlib.sha256(hashlib.sha256(training).digest() + held_out).hexdigest(),
    )


def is_held_out(name: str, fraction: float) -> bool:
    """Return whether a document is held out; the same on every machine and in every order."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < fraction * 2**64


def standard_library() -> Iterator[Document]:
    """Yield the source files of this interpreter's standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _walk(root, skipped=("site-packages", "dist-packages")):
        if path.suffix == ".py":
            yield Document(path.relative_to(root).as_posix(), _read(path))


def read_documents(paths: Sequence[str]) -> Iterator[Document]:
    """Yield the documents of files and folders, in the order given, folders sorted.

    Inside a folder, hidden files, broken links and files with a NUL byte (images, archives) are passed over; a file
    that is named itself is always read.
    """
    for given in map(Path, paths):
        if given.is_dir():
            for path in _walk(given):
                if b"\0" not in (text := _read(path)):
                    yield from _documents_of(path, path.relative_to(given).as_posix(), text)
        else:
            yield from _documents_of(given, given.name, _read(given))


def _walk(root: Path, skipped: Sequence[str] = ()) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
        paths = (Path(folder, name) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        hint = "give existing text files, .jsonl files or folders to --data.paths"
        raise DataError(f"cannot read the data path {str(path)!r}: {error.strerror}", hint) from None


def _documents_of(path: Path, name: str, text: bytes) -> Iterator[Document]:
    if path.suffix != ".jsonl":
        yield Document(name, text)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield Document(f"{name}:{number}", _text_of_line(line, f"{path}, line {number}"))


def _text_of_line(line: bytes, place: str) -> bytes:
    hint = 'every line must be an object such as {"text": "..."}'
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is not JSON: {error}", hint) from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DataError(f"{place} has no text under the key 'text'", hint)
    return str(record["text"]).encode("utf-8", "surrogatepass")


def _check_enough(texts: dict[str, bytes], paths: Sequence[str], sequence_length: int) -> None:
    source = ", ".join(paths) or sysconfig.get_paths()["stdlib"]
    if not any(texts.values()):
        raise DataError(f"there is no text in {source}", "give files with text to --data.paths")
    for side, text in texts.items():
        if len(text) <= sequence_length:
            raise DataError(
                f"the {side} text from {source} has {len(text)} bytes; a window of model.sequence_length "
                f"{sequence_length} and its targets need {sequence_length + 1}",
                "give more text, or lower --model.sequence_length",
            )
