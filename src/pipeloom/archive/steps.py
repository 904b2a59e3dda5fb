"""The checkpoints of one run: folders ``step-000200``, ``step-000400``, … side by side."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final

from pipeloom.archive.manifest import MANIFEST

_NAME: Final = re.compile(r"step-(\d{6,})")
_ASIDE: Final = re.compile(r"set-aside-(\d+)")


def step_of(folder: Path) -> int | None:
    """Return the step of a checkpoint's folder name, or None if it is not one."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def folder_of(store: Path, step_index: int) -> Path:
    """Return where the checkpoint of a step lies, or would lie."""
    return store / f"step-{step_index:06d}"


def steps_in(store: Path) -> list[int]:
    """Return the steps of all finished checkpoints, good or not, ascending."""
    if not store.is_dir():
        return []
    return sorted(step for path in store.iterdir() if (step := step_of(path)) is not None)


def keep_newest(store: Path, num_kept: int, just_saved: int) -> None:
    """Remove the oldest checkpoints beyond ``num_kept``, counted from the one that was just saved.

    Later ones count for nothing and stay: they are of a run that went back, often because they are damaged, and would
    push out every checkpoint that it saves.
    """
    for step_index in [step for step in steps_in(store) if step <= just_saved][:-num_kept]:
        # The manifest goes first: what a crash leaves half removed cannot pass for a checkpoint.
        (folder_of(store, step_index) / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder_of(store, step_index))


def set_aside_after(store: Path, step_index: int) -> Path | None:
    """Move checkpoints later than ``step_index`` out of the way of a run that goes on from there.

    They are kept: the run that made them may be what the user wants to compare with.

    Returns:
        The folder they were moved to, or None if there were none.
    """
    return set_aside(store, [step for step in steps_in(store) if step > step_index])


def set_aside(store: Path, steps: Collection[int]) -> Path | None:
    """Move the checkpoints of these steps out of the way, as far as they are there.

    Returns:
        The folder they were moved to, or None if there were none.
    """
    found = [step for step in steps_in(store) if step in steps]
    if not found:
        return None
    # Not their count: users delete some of them.
    taken = [int(match[1]) for path in store.iterdir() if (match := _ASIDE.fullmatch(path.name))]
    aside = store / f"set-aside-{max(taken, default=0) + 1}"
    aside.mkdir()
    for step in found:
        folder_of(store, step).rename(aside / folder_of(store, step).name)
    return aside
