"""A folder that is there whole or not at all.

Writing into the final place leaves half a checkpoint when the machine dies, and it looks like a whole
one. Here everything is written into ``.tmp-…`` beside it, flushed to the disk, listed with sizes and
SHA-256 in a manifest that is written last, and renamed in one step. Loading reads no file that the
manifest does not vouch for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pipeloom.errors import CheckpointError

MANIFEST: Final = "manifest.json"
FORMAT: Final = "pipeloom-checkpoint"
FORMAT_VERSION: Final = 1
TEMPORARY_PREFIX: Final = ".tmp-"
OTHER_HINT: Final = "continue from another checkpoint: --resume PATH"


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder to write into; on a clean exit it becomes ``target``, else it is removed.

    Raises:
        CheckpointError: ``target`` exists (nothing is ever overwritten) or the disk refuses.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists already; a checkpoint is never overwritten", "choose another folder")
    temporary = target.parent / f"{TEMPORARY_PREFIX}{target.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # what a run that died left
        temporary.mkdir(parents=True)
        yield temporary
        _write_manifest(temporary)
        temporary.rename(target)
        _flush(target.parent)
    except OSError as error:
        hint = "make room on the disk, or choose another --train.folder"
        raise CheckpointError(f"cannot write the checkpoint {target}: {error}", hint) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def verify_folder(folder: Path) -> None:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: a file that is missing, of another size or content; names the file.
    """
    files = read_json(folder / MANIFEST)
    if files.get("format") != FORMAT or files.get("version") != FORMAT_VERSION:
        given = f"{files.get('format')!r} version {files.get('version')!r}"
        needed = f"this is {FORMAT!r} version {FORMAT_VERSION}"
        raise CheckpointError(f"{folder / MANIFEST} says {given}; {needed}", OTHER_HINT)
    for name, expected in _listed(files, folder):
        _verify_file(folder / name, int(expected["bytes"]), str(expected["sha256"]))


def _listed(manifest: dict[str, Any], folder: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        listed = [(name, {"bytes": int(e["bytes"]), "sha256": e["sha256"]}) for name, e in manifest["files"].items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error!r}", OTHER_HINT) from None
    outside = [name for name, _ in listed if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{folder / MANIFEST} lists a file outside its folder: {outside[0]!r}", OTHER_HINT)
    return listed


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: the file is missing or damaged; names it.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}", OTHER_HINT) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}", OTHER_HINT) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it holds no object", OTHER_HINT)
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as readable JSON."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        _flush(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    write_json(folder / MANIFEST, {"format": FORMAT, "version": FORMAT_VERSION, "files": files})
    _flush(folder / MANIFEST)
    _flush(folder)


def _verify_file(path: Path, num_bytes: int, sha256: str) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, but the manifest lists it", OTHER_HINT)
    actual = path.stat().st_size
    if actual != num_bytes:
        word = "truncated" if actual < num_bytes else "too long"
        raise CheckpointError(f"{path} is {word}: {actual} bytes, the manifest says {num_bytes}", OTHER_HINT)
    if _sha256(path) != sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's", OTHER_HINT)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
