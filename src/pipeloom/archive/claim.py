"""Temporary folders: in use as long as who made them lives, and remains afterwards.

A name with a process's number says little: numbers come again, and another machine has its own. A lock on a file beside
the folder is let go by the system at the moment its owner dies, by kill -9 too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_TEMPORARY: Final = re.compile(r"\.tmp-(.+?)(?:-[0-9a-f]{8})?(?:\.lock)?")
_STEP: Final = re.compile(r"step-\d{6,}")
_NUM_NAMES: Final = 10


def _new_nonce() -> str:
    return secrets.token_hex(4)


@dataclass
class Claim:
    """A new temporary folder for ``target``, and the lock that says that it is in use.

    Attributes:
        target: what the folder will be renamed to.
        nonce: tells attempts apart. Another one than was given, if somebody had that one's lock.

    Raises:
        OSError: the folder cannot be made.
    """

    target: Path
    nonce: str = field(default_factory=_new_nonce)

    def __post_init__(self) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._own_lock()
        try:
            self.folder.mkdir()
        except OSError:
            self.release()
            raise

    @property
    def folder(self) -> Path:
        """Beside the target, so that it can be renamed to it."""
        return temporary_of(self.target, self.nonce)

    def _own_lock(self) -> int | None:
        """Lock the file beside a folder of a name that is free; None where locks do not exist.

        There nobody can take one either, and remains stay.
        """
        for _ in range(_NUM_NAMES):
            try:
                lock = _locked(_lock_of(self.folder))
            except OSError:
                return None
            if lock is not None:
                return lock
            # `remove_remains` of another process found the new file before it was locked, and will remove it.
            self.nonce = _new_nonce()
        raise BlockingIOError(f"another process holds the lock of each new folder beside {self.target}")

    def release(self) -> None:
        """Give up the lock; the folder was renamed or removed."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                _lock_of(self.folder).unlink()
            with contextlib.suppress(OSError):
                os.close(lock)


def temporary_of(target: Path, nonce: str) -> Path:
    """Return the temporary folder of one attempt to make ``target``."""
    return target.parent / f".tmp-{target.name}-{nonce}"


def remove_remains(store: Path, name: str = "") -> None:
    """Remove temporary folders of checkpoints, or of ``name``, that nobody alive is writing."""
    found = {path.with_name(path.name.removesuffix(".lock")) for path in store.glob(".tmp-*") if _is_ours(path, name)}
    for folder in sorted(found):
        with contextlib.suppress(OSError):
            lock = _locked(_lock_of(folder))
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                _lock_of(folder).unlink()
                os.close(lock)


def remove_folder(folder: Path) -> None:
    """Remove a folder into which others may still be writing: what they open later fails.

    A disk that refuses leaves it, as remains: this is called because of an error, which none of its own may hide.
    """
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            if not folder.exists():
                return
        time.sleep(0.01)


def _is_ours(path: Path, name: str) -> bool:
    match = _TEMPORARY.fullmatch(path.name)
    return match is not None and (match[1] == name or _STEP.fullmatch(match[1]) is not None)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _locked(path: Path) -> int | None:
    """Open a file and lock it; None if another one has it, or removed it meanwhile.

    Raises:
        OSError: it cannot be opened, or there are no locks on this file system.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
