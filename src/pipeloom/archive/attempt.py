"""One attempt at a checkpoint: whole or not at all, also where several processes write it.

Writing into the final place leaves half a checkpoint when the machine dies, and it looks like a whole one. Waiting for
each other through the network, in the background, means a collective that a dying rank leaves hanging beside those of
the training. Here ranks agree once, at the beginning, and then only the folder speaks::

    .tmp-step-000200-5f0c1d2e/
        stage-000.safetensors, stage-000.optimizer.safetensors      by the rank that holds stage 0
        part-000.json       they are on the disk: names, bytes, checksums
        failed-1            rank 1 cannot write: everybody stops
    step-000200/            rank 0 saw all parts, wrote the manifest and renamed the folder

A process that dies leaves a folder with ``.tmp-`` before its name, which the next attempt removes (`claim`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from pipeloom.archive.claim import Claim, remove_folder, remove_remains, temporary_of
from pipeloom.archive.durable import flush, json_bytes, read_json, write_new
from pipeloom.archive.group import ALONE, Group, gather_json
from pipeloom.archive.manifest import MANIFEST, TRAINING, Contents, FileRecord, Manifest
from pipeloom.archive.steps import step_of
from pipeloom.errors import CheckpointError

LIMIT_S: Final = 600.0
"""How long ranks wait for each other's parts; a rank that died is known long before."""

WriteStage = Callable[[Path, int], Contents]


@dataclass(frozen=True)
class Attempt:
    """What one rank has to do for it.

    Attributes:
        target: the checkpoint's folder, which does not exist yet.
        folder: where it is written.
        stages: all of them.
        own: those that this rank writes.
        claim: rank 0's.
        limit_s: how long to wait for other ranks.
    """

    target: Path
    folder: Path
    rank: int
    stages: tuple[int, ...]
    own: tuple[int, ...]
    claim: Claim | None
    limit_s: float

    def write(self, write_stage: WriteStage, manifest: Manifest, training: dict[str, Any]) -> OSError | None:
        """Write this rank's stages; return when the checkpoint is there. May run in any thread.

        Args:
            write_stage: writes the files of a stage into a folder, flushed.
            manifest: without contents; rank 0's counts.
            training: what else is saved, as JSON; rank 0's counts.

        Returns:
            Why the checkpoint, which is there, may be gone after a power failure: rank 0 could not bring its name to
            the disk. Else None.

        Raises:
            CheckpointError: it could not be written, here or elsewhere; nothing of it is left.
        """
        try:
            if self.claim is not None:
                remove_remains(self.target.parent, self.target.name)
            for stage in self.own:
                _put_part(self.folder, stage, write_stage(self.folder, stage))
            if self.claim is None:
                self._await_end()
            else:
                self._publish(manifest, training)
        except BaseException as error:
            self.give_up(error)
            if isinstance(error, OSError):
                raise unwritten(self.target, error) from error
            raise
        return self._settled(self.claim) if self.claim is not None else None

    def give_up(self, error: BaseException) -> None:
        """Tell the others; rank 0 takes away what was written."""
        if self.claim is not None:
            remove_folder(self.folder)
            self.claim.release()
            return
        try:
            (self.folder / f"failed-{self.rank}").write_text(str(error), "utf-8")
        except OSError:  # not even that fits on the disk: a folder that is gone says it too
            remove_folder(self.folder)

    def _publish(self, manifest: Manifest, training: dict[str, Any]) -> None:
        contents = Contents.merged(self._await_parts())
        content = json_bytes(training)
        contents.files[TRAINING] = FileRecord(len(content), write_new(self.folder / TRAINING, [content]))
        write_new(self.folder / MANIFEST, [replace(manifest, contents=contents).as_bytes()])
        for stage in self.stages:
            _part(self.folder, stage).unlink()
        flush(self.folder)
        self.folder.rename(self.target)

    def _settled(self, claim: Claim) -> OSError | None:
        """Flush the new name. Other ranks may have seen it already, so it is too late for the save to fail."""
        try:
            flush(self.target.parent)
        except OSError as error:
            return error
        finally:
            claim.release()
        return None

    def _await_parts(self) -> list[Contents]:
        for waited_s in _pauses():
            failed = sorted(self.folder.glob("failed-*"))
            missing = [stage for stage in self.stages if not _part(self.folder, stage).exists()]
            if failed:
                reason = failed[0].read_text("utf-8") or "it did not say why"
                self._fail(f"rank {failed[0].name.removeprefix('failed-')} gave up: {reason}")
            if not missing:
                break
            if not self.folder.exists():
                self._fail("another rank gave up, and could not even say so")
            if waited_s > self.limit_s:
                self._fail(f"stages {missing} were not written within {self.limit_s:g} s")
        return [Contents.from_json(read_json(_part(self.folder, stage))[0]) for stage in self.stages]

    def _await_end(self) -> None:
        for waited_s in _pauses():
            if self.target.exists():
                return
            # The folder may have got its name between the two looks.
            if not self.folder.exists() and not self.target.exists():
                self._fail("rank 0 gave up, and says why")
            if waited_s > self.limit_s:
                self._fail(f"rank 0 did not finish it within {self.limit_s:g} s")

    def _fail(self, reason: str) -> NoReturn:
        raise unwritten(self.target, reason)


def unwritten(target: Path, reason: object) -> CheckpointError:
    """The error of a checkpoint that could not be written."""
    return CheckpointError(
        f"cannot write the checkpoint {target}: {reason}",
        "make room on the disk, or choose a folder that can be written to",
    )


def begin(
    target: Path, step_index: int, stages: Sequence[int], group: Group = ALONE, limit_s: float = LIMIT_S
) -> Attempt:
    """Agree with all ranks on a new attempt; collective, and short.

    Args:
        target: the checkpoint's folder; the same on all ranks.
        step_index: the step that is saved.
        stages: those that this rank holds. What several hold is written by the first of them.
        group: the ranks.
        limit_s: how long to wait for other ranks in `Attempt.write`.

    Raises:
        CheckpointError: ranks save different steps, or ``target`` exists (nothing is ever overwritten); on every rank.
        OSError: rank 0 cannot make the folder; on every rank.
    """
    claim, fault, exists = _claimed(target) if group.rank == 0 else (None, "", False)
    try:
        nonce = claim.nonce if claim is not None else ""
        mine = {"step_index": step_index, "nonce": nonce, "stages": [*stages], "fault": fault, "exists": exists}
        everyones = gather_json(group, mine, f"the checkpoint of step {step_index}")
        _check_agreement(everyones, target)
    except BaseException:
        if claim is not None:
            remove_folder(claim.folder)
            claim.release()
        raise
    writer = {stage: rank for rank in reversed(range(group.num_ranks)) for stage in everyones[rank]["stages"]}
    own = tuple(sorted(stage for stage, rank in writer.items() if rank == group.rank))
    folder = temporary_of(target, everyones[0]["nonce"])
    return Attempt(target, folder, group.rank, tuple(sorted(writer)), own, claim, limit_s)


def _claimed(target: Path) -> tuple[Claim | None, str, bool]:
    """Return the claim, or what is in its way: rank 0's disk decides, and no rank raises before all have met."""
    try:
        exists = target.exists()
        return (None if exists else Claim(target)), "", exists
    except OSError as error:
        return None, str(error), False


def _check_agreement(everyones: list[dict[str, Any]], target: Path) -> None:
    first = everyones[0]["step_index"]
    for rank, each in enumerate(everyones):
        if each["step_index"] != first:
            raise CheckpointError(
                f"rank 0 saves step {first}, rank {rank} saves step {each['step_index']}: {target} is of one step",
                "save at the same step on every rank",
            )
    if step_of(target) not in (None, first):
        raise CheckpointError(f"step {first} cannot be saved as {target}, which is the name of another step")
    if everyones[0]["exists"]:
        raise CheckpointError(f"{target} exists already; a checkpoint is never overwritten", "choose another folder")
    if everyones[0]["fault"]:
        raise OSError(everyones[0]["fault"])


def _part(folder: Path, stage: int) -> Path:
    return folder / f"part-{stage:03d}.json"


def _put_part(folder: Path, stage: int, contents: Contents) -> None:
    """Say that a stage is written; others look at any moment, so the file gets its name when it is whole."""
    path = _part(folder, stage)
    unnamed = path.with_suffix(".unnamed")
    write_new(unnamed, [json.dumps(asdict(contents)).encode()])
    unnamed.rename(path)


def _pauses() -> Iterator[float]:
    """Yield the seconds since the first look, with a pause after each: short ones first."""
    began_s, pause_s = time.monotonic(), 0.001
    while True:
        yield time.monotonic() - began_s
        time.sleep(pause_s)
        pause_s = min(0.05, 1.5 * pause_s)
