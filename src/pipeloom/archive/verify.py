"""What is wrong with a checkpoint, file by file, each by its name.

A checksum says that a file is not what was written; it does not say why. A shard says itself of which step and stage
it is, so that shards of two steps that were swapped, equal in name and size, are told from damage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeloom.archive.durable import read_json, sha256_of
from pipeloom.archive.group import ALONE, Group, gather_json
from pipeloom.archive.manifest import MANIFEST, MODEL_SHARD, TRAINING, FileRecord, Manifest, read_manifest
from pipeloom.archive.shard import Header, read_header
from pipeloom.archive.steps import folder_of, step_of, steps_in
from pipeloom.errors import CheckpointError


def faults_of(folder: Path) -> list[str]:
    """Return everything that is wrong with a checkpoint, each with the file's name; nothing in it is executed."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [error.message]
    return [*_faults(folder, manifest, manifest.contents.files)]


def verify_folder(folder: Path, group: Group = ALONE) -> Manifest:
    """Check every file of a checkpoint against its manifest; with several ranks each checks its share.

    Returns:
        The manifest.

    Raises:
        CheckpointError: a file that is missing, of another size, content or step, on every rank; names the file.
    """
    manifest, faults = None, []
    try:
        manifest = read_manifest(folder)
        share = sorted(manifest.contents.files)[group.rank :: group.num_ranks]
        faults = [*_faults(folder, manifest, share)]
    except CheckpointError as error:
        faults = [error.message]
        hint = error.hint
    else:
        hint = None
    everyones = gather_json(group, faults, f"the check of {folder.name}")
    first = next((fault for each in everyones for fault in each), None)
    if manifest is None or first is not None:
        raise CheckpointError(str(first), hint)
    return manifest


def newest_good(store: Path, group: Group = ALONE) -> tuple[Manifest | None, list[CheckpointError]]:
    """Return the newest checkpoint that verifies, if there is one, and why newer ones were passed over."""
    faults: list[CheckpointError] = []
    steps, *_ = gather_json(group, steps_in(store), f"the checkpoints in {store.name}")
    for step_index in reversed(steps):
        try:
            return verify_folder(folder_of(store, step_index), group), faults
        except CheckpointError as error:
            faults.append(error)
    return None, faults


def offer_beside(folder: Path) -> str:
    """Return what to do about a damaged checkpoint: go on from the newest good one beside it."""
    good, _ = newest_good(folder.parent)
    if good is None:
        return "there is no good checkpoint beside it"
    path = folder_of(folder.parent, good.step_index)
    return f"the newest good checkpoint beside it is {path}: continue from that one, --resume {path}"


def _faults(folder: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[str]:
    step_index = step_of(folder)
    if step_index not in (None, manifest.step_index):
        yield f"{folder / MANIFEST} is of step {manifest.step_index}, the folder of step {step_index}"
    for name in names:
        path, record = folder / name, manifest.contents.files[name]
        try:
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, but the manifest lists it")
            header = _check_identity(path, manifest) if name.endswith(MODEL_SHARD) else None
            _check_content(path, record)
            if name.endswith(MODEL_SHARD):
                _check_tensors(path, header or read_header(path), manifest)
            elif name == TRAINING:
                _check_step(path, read_json(path)[0].get("step_index"), manifest)
        except CheckpointError as error:
            yield error.message
        except OSError as error:
            yield f"cannot read {path}: {error.strerror}"


def _check_identity(path: Path, manifest: Manifest) -> Header | None:
    """Read the shard's header, if it can be read, and check whose shard it is."""
    try:
        header = read_header(path)
    except CheckpointError:
        return None
    _check_step(path, header.metadata.get("step_index"), manifest)
    stage = header.metadata.get("stage", "")
    if not path.name.startswith(f"stage-{stage:>03}."):
        raise CheckpointError(f"{path} is the shard of stage {stage}")
    return header


def _check_step(path: Path, step_index: object, manifest: Manifest) -> None:
    if str(step_index) != str(manifest.step_index):
        raise CheckpointError(f"{path} is of step {step_index}, the manifest of step {manifest.step_index}")


def _check_content(path: Path, record: FileRecord) -> None:
    num_bytes = path.stat().st_size
    if num_bytes != record.num_bytes:
        word = "truncated" if num_bytes < record.num_bytes else "too long"
        raise CheckpointError(f"{path} is {word}: {num_bytes} bytes, the manifest says {record.num_bytes}")
    if sha256_of(path) != record.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's")


def _check_tensors(path: Path, header: Header, manifest: Manifest) -> None:
    listed = manifest.contents.tensors_of(path.name)
    if header.forms != listed:
        differing = sorted(name for name in {*header.forms, *listed} if header.forms.get(name) != listed.get(name))
        raise CheckpointError(f"{path} does not hold what the manifest says of {differing[0]!r}")
