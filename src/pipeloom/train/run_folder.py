"""Where a run lives, and where a run goes on from.

A fixed output folder means that the second run destroys the first. Here a new run takes a folder that is
empty or not there yet, a resumed run goes on in its own, and nothing that a run has written is overwritten:
checkpoints later than the one that it continues from are moved aside.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pipeloom.checkpoint import CheckpointStore, Snapshot, load_snapshot, step_of
from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.train.config import Layer, TrainingConfig, resolve, to_toml

_RUNS = Path("runs")
_CONFIG = "config.toml"


@dataclass(frozen=True)
class Start:
    """What a run begins from.

    Attributes:
        config: resolved; ``config.train.folder`` is the run's folder.
        snapshot: the state to go on from, or None.
        notes: what the user should know about how it was found.
    """

    config: TrainingConfig
    snapshot: Snapshot | None = None
    notes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.train.folder)

    @property
    def store(self) -> CheckpointStore:
        """The run's checkpoints."""
        return store_of(self.folder)


def store_of(folder: Path) -> CheckpointStore:
    """Return the checkpoints of the run in ``folder``."""
    return CheckpointStore(folder / "checkpoints")


def find_start(resume: str | None, layers: Sequence[Layer]) -> Start:
    """Resolve the configuration, and find the snapshot to go on from.

    Args:
        resume: None for a new run, a run or a checkpoint to continue, or "" for the newest one of the run in
            ``train.folder``, by default of the newest run.
        layers: configuration from files and flags; a saved run's own lies under them.

    Raises:
        ConfigError: a bad key or value, or a new run in a folder that is in use.
        CheckpointError: nothing to continue from, or it is damaged.
    """
    given = _given_folder(layers)
    if resume is None:
        return Start(_in_folder(resolve(layers), _unused(given or _fresh_folder())))
    folder, snapshot, notes = _find(Path(resume)) if resume else _latest(given or _newest_run())
    if given and given.resolve() != folder.resolve():
        folder = _unused(given)
    saved = Layer("the configuration of the checkpoint", _configuration(folder, snapshot))
    return Start(_in_folder(resolve([saved, *layers]), folder), snapshot, notes)


def prepare_folder(start: Start) -> tuple[str, ...]:
    """Create the run's folder, or make room in it, and save the resolved configuration there.

    Returns:
        What the user should know: which checkpoints were moved aside.
    """
    folder, text, aside = start.folder, to_toml(start.config), None
    step_index = start.snapshot.step_index if start.snapshot else 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _CONFIG
        if path.exists() and path.read_text(encoding="utf-8") != text:
            path = folder / f"config-from-step-{step_index:06d}.toml"
        path.write_text(text, encoding="utf-8")
        start.store.remove_remains()
        if start.snapshot:
            aside = start.store.set_aside_after(step_index)
    except OSError as error:
        raise ConfigError(f"cannot use the run folder {folder}: {error}", "choose another --train.folder") from None
    return (f"checkpoints after step {step_index} were moved to {aside}",) if aside else ()


def _given_folder(layers: Sequence[Layer]) -> Path | None:
    """Read ``train.folder`` before anything is checked: a saved configuration may have to come below."""
    tables = [layer.values.get("train") for layer in layers]
    folders = [table["folder"] for table in tables if isinstance(table, Mapping) and table.get("folder")]
    return Path(str(folders[-1])) if folders else None


def _in_folder(config: TrainingConfig, folder: Path) -> TrainingConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"folder": str(folder)})})


def _fresh_folder() -> Path:
    name = time.strftime("%Y%m%d-%H%M%S")
    numbered = (_RUNS / f"{name}-{number}" for number in range(2, 1000))
    return next(folder for folder in chain([_RUNS / name], numbered) if not folder.exists())


def _unused(folder: Path) -> Path:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        what = "holds a run" if (folder / _CONFIG).exists() else "is not an empty folder"
        raise ConfigError(
            f"the run folder {folder} {what}; a new run would overwrite it",
            "add --resume to continue a run, or choose another --train.folder",
        )
    return folder


def _newest_run() -> Path:
    stores = {folder: store_of(folder) for folder in _RUNS.glob("*")}
    last_save_s = {run: s.path_of(s.steps()[-1]).stat().st_mtime for run, s in stores.items() if s.steps()}
    if not last_save_s:
        raise CheckpointError(f"there is no run with a checkpoint in {_RUNS.resolve()}", "say which one: --resume PATH")
    return max(last_save_s, key=lambda run: last_save_s[run])


def _configuration(folder: Path, snapshot: Snapshot) -> Mapping[str, Any]:
    """What of a checkpoint only `pipeloom train` saves."""
    if {"config", "position", "fingerprint"} <= snapshot.training.keys():
        return snapshot.training["config"]  # type: ignore[no-any-return]
    raise CheckpointError(
        f"the checkpoint of step {snapshot.step_index} in {folder} was not saved by pipeloom train",
        "go on with the loop that saved it: pipeloom.checkpoint.load_checkpoint",
    )


def _latest(folder: Path) -> tuple[Path, Snapshot, tuple[str, ...]]:
    snapshot, faults = store_of(folder).latest_good()
    return folder, snapshot, tuple(f"passed over a damaged checkpoint: {fault.message}" for fault in faults)


def _find(path: Path) -> tuple[Path, Snapshot, tuple[str, ...]]:
    """Return run folder, snapshot and notes for a checkpoint, a run, or a run's checkpoints."""
    if step_of(path) is not None:
        run = path.resolve().parent.parent
        return (run if (run / _CONFIG).exists() else _fresh_folder()), load_snapshot(path), ()
    folder = path.parent if path.name == "checkpoints" else path
    if not store_of(folder).folder.is_dir():
        hint = "give a folder like runs/NAME or runs/NAME/checkpoints/step-000200"
        raise CheckpointError(f"{path} is neither a run nor a checkpoint", hint)
    return _latest(folder)
