"""A checkpoint that was verified, to be read in parts: each rank takes what it holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pipeloom.archive.group import ALONE, Group
from pipeloom.archive.manifest import Manifest
from pipeloom.checkpoint.snapshot import Snapshot, read_snapshot, verified
from pipeloom.checkpoint.store import CheckpointStore
from pipeloom.errors import CheckpointError


@dataclass(frozen=True)
class Opened:
    """What is known of it before its tensors are read.

    Attributes:
        folder: the checkpoint's.
        manifest: verified with all the files.
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def at(cls, folder: Path, group: Group = ALONE) -> Self:
        """Open the checkpoint in a folder; collective.

        Raises:
            CheckpointError: it is damaged; names the file, and the newest good checkpoint beside it.
        """
        return cls(folder, verified(folder, group))

    @classmethod
    def newest(cls, store: CheckpointStore, group: Group = ALONE) -> tuple[Self, list[CheckpointError]]:
        """Open the newest good one; return it, and why newer ones were passed over; collective.

        Raises:
            CheckpointError: there is none; the message holds each one's fault.
        """
        manifest, faults = store.newest(group)
        return cls(store.path_of(manifest.step_index), manifest), faults

    @property
    def step_index(self) -> int:
        """Completed steps."""
        return self.manifest.step_index

    @cached_property
    def training(self) -> dict[str, Any]:
        """What else the run needs to go on."""
        return self.read(()).training

    @property
    def forms(self) -> Mapping[str, Any]:
        """What the whole model's entries are like, for `check_same_model`."""
        contents = self.manifest.contents
        forms = {name: record.form for name, record in contents.model.items()} | contents.values["model"]
        return forms | {name: forms[owner] for name, owner in contents.tied.items()}

    def read(self, names: Collection[str] | None = None) -> Snapshot:
        """Read these entries of the model and the optimizer's state of them; None: all."""
        return read_snapshot(self.folder, self.manifest, names)
