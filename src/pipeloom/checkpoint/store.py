"""The checkpoints of one run: which is the newest good one, and which may go."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeloom.checkpoint.folder import MANIFEST
from pipeloom.checkpoint.snapshot import Snapshot, load_snapshot, save_snapshot
from pipeloom.errors import CheckpointError

_NAME: Final = re.compile(r"step-(\d{6,})")


def step_of(folder: Path) -> int | None:
    """Return the step of a checkpoint's folder name, or None if it is not one."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class CheckpointStore:
    """A folder of ``step-000200``, ``step-000400``, …"""

    folder: Path

    def path_of(self, step_index: int) -> Path:
        """Return where the checkpoint of a step lies, or would lie."""
        return self.folder / f"step-{step_index:06d}"

    def steps(self) -> list[int]:
        """Return the steps of all finished checkpoints, good or not, ascending."""
        if not self.folder.is_dir():
            return []
        return sorted(step for path in self.folder.iterdir() if (step := step_of(path)) is not None)

    def save(self, snapshot: Snapshot, num_kept: int) -> Path:
        """Write a snapshot, then remove the oldest checkpoints beyond ``num_kept``."""
        path = self.path_of(snapshot.step_index)
        save_snapshot(path, snapshot)
        for step_index in self.steps()[:-num_kept]:
            # The manifest goes first: what a crash leaves half removed cannot pass for a checkpoint.
            (self.path_of(step_index) / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.path_of(step_index))
        return path

    def latest_good(self) -> tuple[Snapshot, list[CheckpointError]]:
        """Return the newest snapshot that verifies, and why newer ones were passed over.

        Raises:
            CheckpointError: there is none; the message holds each one's fault.
        """
        faults: list[CheckpointError] = []
        for step_index in reversed(self.steps()):
            try:
                return load_snapshot(self.path_of(step_index)), faults
            except CheckpointError as error:
                faults.append(error)
        found = "".join(f"\n  {error.message}" for error in faults)
        raise CheckpointError(
            f"there is no checkpoint to continue from in {self.folder}{found}",
            "continue another run with --resume PATH, or start a new one without --resume",
        )

    def set_aside_after(self, step_index: int) -> Path | None:
        """Move checkpoints later than ``step_index`` out of the way of a run that goes on from there.

        They are kept: the run that made them may be what the user wants to compare with.

        Returns:
            The folder they were moved to, or None if there were none.
        """
        later = [step for step in self.steps() if step > step_index]
        if not later:
            return None
        number = 1 + len(list(self.folder.glob("set-aside-*")))
        aside = self.folder / f"set-aside-{number}"
        aside.mkdir()
        for step in later:
            self.path_of(step).rename(aside / self.path_of(step).name)
        return aside
