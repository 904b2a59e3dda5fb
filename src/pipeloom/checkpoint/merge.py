"""One file of a checkpoint's shards, for programs that know nothing of pipelines."""

from __future__ import annotations

from pathlib import Path

from pipeloom.archive.shard import write_shard
from pipeloom.checkpoint.snapshot import load_snapshot
from pipeloom.checkpoint.tensors import bytes_of, form_of
from pipeloom.errors import CheckpointError


def merge_model(folder: Path, target: Path) -> int:
    """Write a checkpoint's parameters and buffers into one safetensors file, under the whole model's names.

    A tied weight is written under each of its names, so that ``model.load_state_dict(load_file(target))`` finds all.

    Returns:
        How many tensors there are in it.

    Raises:
        CheckpointError: the checkpoint is damaged (names the file), or ``target`` exists or cannot be written.
    """
    model = load_snapshot(folder).model
    values = [name for name, value in model.items() if not hasattr(value, "numel")]
    tensors = {name: (form_of(t, name), bytes_of(t)) for name, t in model.items() if name not in values}
    try:
        write_shard(target, tensors, {"format": "pt"})
    except FileExistsError:
        raise CheckpointError(f"{target} exists already; nothing is ever overwritten", "choose another name") from None
    except OSError as error:
        target.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {target}: {error}", "make room on the disk") from None
    return len(tensors)
