"""Checkpoints written while training goes on: it stops for a copy in memory, not for the disk.

At most one is on its way. A save that comes while another is written waits for it, rather than being left out: which
checkpoints a run has then follows from its configuration, not from how fast the disk was. A failed save is a warning
and a number, since a full disk is no reason to lose what a run has learnt; the failure of the last one is an error.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

from pipeloom.archive.attempt import LIMIT_S, Attempt, begin, unwritten
from pipeloom.archive.group import ALONE, Group
from pipeloom.archive.manifest import Manifest
from pipeloom.checkpoint.parts import Copies, Part, head_of, parts_of
from pipeloom.checkpoint.snapshot import Snapshot
from pipeloom.checkpoint.store import CheckpointStore, remove_old
from pipeloom.errors import CheckpointError, PipeloomWarning

_GRACE_S = 0.5


class Saver:
    """Writes the checkpoints of one run in the background; leave it as a context, so that the last one is whole.

    Args:
        store: where they go, and how many are kept.
        group: the ranks that save together; None: those of the first save. All of them make the same calls, from
            their main threads.
        limit_s: how long ranks wait for each other's parts.

    Attributes:
        failed_saves: how many could not be written.
        saved_step: the step of the newest one that is whole, None before the first.
    """

    def __init__(self, store: CheckpointStore, group: Group | None = None, limit_s: float = LIMIT_S) -> None:
        self.store = store
        self.failed_saves = 0
        self.saved_step: int | None = None
        self._own_group = group
        self._limit_s = limit_s
        self._copies = Copies()
        self._preparation: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        self._said = ""
        self._last_failure: CheckpointError | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is on its way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def _group(self) -> Group:
        return ALONE if self._own_group is None else self._own_group

    def prepare(self, make: Callable[[], Snapshot]) -> None:
        """Get the memory of the copies in the background, once: else the first save stops several times as long.

        Args:
            make: returns a snapshot like those that will be saved.
        """
        if self._preparation is None:
            self._preparation = threading.Thread(target=self._copies.reserve, args=(parts_of(make()),), daemon=True)
            self._preparation.start()

    def save(self, snapshot: Snapshot, group: Group | None = None) -> None:
        """Copy a snapshot and begin to write it; collective. Returns as soon as training may change the tensors.

        Args:
            snapshot: what is saved.
            group: the ranks that save together, if that was not said before.

        Raises:
            CheckpointError: there is a checkpoint of that step, ranks save different steps, or the snapshot holds
                what cannot be saved. A disk that refuses is a `PipeloomWarning`.
        """
        self._settle()
        self._last_failure = None
        self._own_group = group if self._own_group is None else self._own_group
        if self._preparation is not None:
            self._preparation.join()
        parts, head = parts_of(snapshot), head_of(snapshot)
        target = self.store.path_of(snapshot.step_index)
        try:
            attempt = begin(target, snapshot.step_index, [*parts], self._group, self._limit_s)
        except OSError as error:
            self._fail(unwritten(target, error))
            return
        try:
            copies = self._copies.of(parts)
        except BaseException as error:
            attempt.give_up(error)
            raise
        # A process that ends waits for its save; not for the part of a rank that will not come any more.
        self._thread = threading.Thread(
            target=self._write, args=(attempt, copies, *head), name="checkpoint", daemon=self._group.num_ranks > 1
        )
        self._thread.start()

    def poll(self) -> None:
        """Take note of a save that ended meanwhile: warn if it failed; costs nothing."""
        if not self.is_busy:
            self._settle()

    def finish(self) -> None:
        """Wait for the save that is on its way.

        Raises:
            CheckpointError: the last save failed.
        """
        self._settle(is_last=True)
        if self._last_failure is not None:
            raise self._last_failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.finish()
        elif self._thread is not None:
            # A rank that died writes no more: then the others do not wait for what cannot become whole.
            self._thread.join(None if self._group.num_ranks == 1 else _GRACE_S)
            self.poll()

    def _write(self, attempt: Attempt, parts: Mapping[int, Part], manifest: Manifest, training: dict[str, Any]) -> None:
        """What the thread runs."""
        step_index = manifest.step_index
        try:
            doubt = attempt.write(
                lambda folder, stage: parts[stage].write(folder, stage, step_index), manifest, training
            )
            self.saved_step = step_index
            if self._group.rank == 0:
                self._said = remove_old(self.store.folder, step_index, self.store.num_kept, doubt)
        except BaseException as error:
            self._fault = error

    def _settle(self, is_last: bool = False) -> None:
        """Wait for the thread and say what came of it."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        fault, self._fault = self._fault, None
        said, self._said = self._said, ""
        if isinstance(fault, CheckpointError):
            self._fail(fault, is_last)
        elif fault is not None:
            raise fault
        elif said:
            warnings.warn(said, PipeloomWarning, stacklevel=3)

    def _fail(self, error: CheckpointError, is_last: bool = False) -> None:
        self.failed_saves += 1
        self._last_failure = error
        if not is_last:
            good = (
                "none was saved before"
                if self.saved_step is None
                else f"the last good one is of step {self.saved_step}"
            )
            warnings.warn(f"{error.message}; training goes on, {good}", PipeloomWarning, stacklevel=4)
