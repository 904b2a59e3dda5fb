"""The checkpoints of one run: which is the newest good one, and which may go."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from pipeloom.archive.attempt import begin, unwritten
from pipeloom.archive.claim import remove_remains
from pipeloom.archive.group import ALONE, Group
from pipeloom.archive.manifest import Manifest
from pipeloom.archive.steps import folder_of, keep_newest, set_aside_after, steps_in
from pipeloom.archive.verify import newest_good
from pipeloom.checkpoint.parts import head_of, parts_of
from pipeloom.checkpoint.snapshot import Snapshot, read_snapshot
from pipeloom.errors import CheckpointError, PipeloomWarning


@dataclass(frozen=True)
class CheckpointStore:
    """A folder of ``step-000200``, ``step-000400``, …

    Attributes:
        folder: where they are.
        num_kept: how many of the newest are kept.

    Raises:
        CheckpointError: ``num_kept`` is less than 1.
    """

    folder: Path
    num_kept: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if self.num_kept < 1:
            raise CheckpointError(f"num_kept={self.num_kept} was given; the newest checkpoint is always kept")

    def path_of(self, step_index: int) -> Path:
        """Return where the checkpoint of a step lies, or would lie."""
        return folder_of(self.folder, step_index)

    def steps(self) -> list[int]:
        """Return the steps of all finished checkpoints, good or not, ascending."""
        return steps_in(self.folder)

    def save(self, snapshot: Snapshot, num_kept: int | None = None, group: Group = ALONE) -> Path:
        """Write a snapshot, then remove the oldest checkpoints beyond ``num_kept``; later steps stay; collective.

        Raises:
            CheckpointError: there is one of that step, or it cannot be written; then the others are as before.
                An old one that cannot be removed is a `PipeloomWarning`.
        """
        path = self.path_of(snapshot.step_index)
        doubt = _written(path, snapshot, group)
        if group.rank == 0 and (said := remove_old(self.folder, snapshot.step_index, num_kept or self.num_kept, doubt)):
            warnings.warn(said, PipeloomWarning, stacklevel=2)
        return path

    def latest_good(self, group: Group = ALONE) -> tuple[Snapshot, list[CheckpointError]]:
        """Return the newest snapshot that verifies, and why newer ones were passed over; collective.

        Raises:
            CheckpointError: there is none; the message holds each one's fault.
        """
        manifest, faults = self.newest(group)
        return read_snapshot(self.path_of(manifest.step_index), manifest), faults

    def newest(self, group: Group = ALONE) -> tuple[Manifest, list[CheckpointError]]:
        """The same without reading it.

        Raises:
            CheckpointError: there is none; the message holds each one's fault.
        """
        manifest, faults = newest_good(self.folder, group)
        if manifest is not None:
            return manifest, faults
        found = "".join(f"\n  {error.message}" for error in faults)
        raise CheckpointError(
            f"there is no checkpoint to continue from in {self.folder}{found}",
            "continue another run with --resume PATH, or start a new one without --resume",
        )

    def remove_remains(self) -> None:
        """Remove what saves that were killed left behind; what somebody writes at the moment stays."""
        remove_remains(self.folder)

    def set_aside_after(self, step_index: int) -> Path | None:
        """Move checkpoints later than ``step_index`` out of the way of a run that goes on from there.

        Returns:
            The folder they were moved to, or None if there were none.
        """
        return set_aside_after(self.folder, step_index)


def save_snapshot(folder: Path, snapshot: Snapshot, group: Group = ALONE) -> Path:
    """Write a snapshot as a new folder of safetensors and JSON, which appears whole or not at all; collective.

    Returns:
        The folder.

    Raises:
        CheckpointError: the folder exists, or cannot be written. If only its name may not last: `PipeloomWarning`.
    """
    doubt = _written(folder, snapshot, group)
    if doubt is not None:
        warnings.warn(_doubtful(folder, doubt), PipeloomWarning, stacklevel=2)
    return folder


def remove_old(store: Path, just_saved: int, num_kept: int, doubt: OSError | None) -> str:
    """Remove the oldest checkpoints beside the one that was just saved, but never for one that may not last.

    Args:
        store: the folder of all of them.
        just_saved: its step.
        num_kept: how many are kept, with that one.
        doubt: why it may not last, as `Attempt.write` says.

    Returns:
        What the user should know, if anything.
    """
    if doubt is not None:
        return f"{_doubtful(folder_of(store, just_saved), doubt)}; no old one was removed"
    try:
        keep_newest(store, num_kept, just_saved)
    except OSError as error:
        return f"an old checkpoint cannot be removed: {error}"
    return ""


def _doubtful(folder: Path, doubt: OSError) -> str:
    return f"the checkpoint {folder} is whole, but a power failure may undo its name: {doubt}"


def _written(folder: Path, snapshot: Snapshot, group: Group) -> OSError | None:
    """Write a snapshot as a new folder; return why it may not last, if so."""
    parts, head = parts_of(snapshot), head_of(snapshot)
    try:
        attempt = begin(folder, snapshot.step_index, [*parts], group)
    except OSError as error:
        raise unwritten(folder, error) from None
    return attempt.write(lambda place, stage: parts[stage].write(place, stage, snapshot.step_index), *head)
