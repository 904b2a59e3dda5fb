"""Files that are on the disk when they seem to be, and JSON that is refused by its name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from pipeloom.errors import CheckpointError

MOST_JSON_BYTES: Final = 100_000_000
"""More than the manifest of any model, less than a machine's memory; safetensors has the same limit for a header."""
_CHUNK_BYTES: Final = 1 << 22


def flush(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a file that does not exist yet, and bring it to the disk.

    Returns:
        The SHA-256 of what was meant to be written: a disk that keeps something else is found out.
    """
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                file.write(chunk)
                digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_bytes(value: dict[str, Any]) -> bytes:
    """Return an object as readable JSON."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the object in a JSON file, and the bytes it was written as.

    Raises:
        CheckpointError: the file is missing, larger than `MOST_JSON_BYTES`, or damaged; names it.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{path} is damaged: it is no file")
    try:
        with path.open("rb") as file:
            content = file.read(MOST_JSON_BYTES + 1)
        if len(content) > MOST_JSON_BYTES:
            raise ValueError(f"it has more than {MOST_JSON_BYTES} bytes")
        value = json.loads(content)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it holds no object")
    return value, content
