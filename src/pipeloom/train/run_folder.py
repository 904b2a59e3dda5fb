"""Where a run lives, and where a run goes on from.

A fixed output folder means that the second run destroys the first.  Here a new run takes a folder that is
empty or not there yet, a resumed run goes on in its own, and nothing that a run has written is ever
overwritten: checkpoints later than the one that it continues from are moved aside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeloom.checkpoint import CheckpointStore, Snapshot, load_snapshot, step_of
from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.train.config import Layer, TrainingConfig, resolve
from pipeloom.train.config_file import to_toml
from pipeloom.train.flags import LATEST

RUNS: Final = Path("runs")
_CONFIG: Final = "config.toml"
_CHECKPOINTS: Final = "checkpoints"


@dataclass(frozen=True)
class Start:
    """What a run begins from.

    Attributes:
        config: resolved; ``config.train.folder`` is the run's folder.
        snapshot: the state to go on from, or None.
        notes: what the user should know about how they were found.
    """

    config: TrainingConfig
    snapshot: Snapshot | None
    notes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.train.folder)

    @property
    def store(self) -> CheckpointStore:
        """The run's checkpoints."""
        return CheckpointStore(self.folder / _CHECKPOINTS)


def find_start(resume: str | None, layers: Sequence[Layer]) -> Start:
    """Resolve the configuration, and find the snapshot if one is asked for.

    Raises:
        ConfigError: a bad key or value, or a new run in a folder that is in use.
        CheckpointError: nothing to continue from, or it is damaged.
    """
    if resume is None:
        config = resolve(layers)
        folder = Path(config.train.folder) if config.train.folder else _fresh_folder()
        _check_unused(folder)
        return Start(_in_folder(config, folder), None)
    given = resolve(layers).train.folder
    if resume == LATEST:
        folder = Path(given) if given else _newest_run()
        snapshot, faults = CheckpointStore(folder / _CHECKPOINTS).latest_good()
        notes = tuple(f"passed over a damaged checkpoint: {fault.message}" for fault in faults)
    else:
        folder, snapshot, notes = *_at_path(Path(resume)), ()
        if given and Path(given).resolve() != folder.resolve():
            folder = Path(given)
            _check_unused(folder)
    saved = Layer(f"the configuration saved in {folder}", snapshot.training["config"])
    return Start(_in_folder(resolve([saved, *layers]), folder), snapshot, notes)


def prepare_folder(start: Start) -> tuple[str, ...]:
    """Create the run's folder, or make room in it, and save the resolved configuration.

    Returns:
        What the user should know: which checkpoints were moved aside.
    """
    folder = start.folder
    step_index = start.snapshot.step_index if start.snapshot else 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _save_config(folder, to_toml(start.config), step_index)
        aside = start.store.set_aside_after(step_index) if start.snapshot else None
    except OSError as error:
        raise ConfigError(f"cannot use the run folder {folder}: {error}", "choose another --train.folder") from None
    return (f"checkpoints after step {step_index} were moved to {aside}",) if aside else ()


def _save_config(folder: Path, text: str, step_index: int) -> None:
    path = folder / _CONFIG
    if path.exists() and path.read_text(encoding="utf-8") != text:
        path = folder / f"config-from-step-{step_index:06d}.toml"
    path.write_text(text, encoding="utf-8")


def _in_folder(config: TrainingConfig, folder: Path) -> TrainingConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"folder": str(folder)})})


def _fresh_folder() -> Path:
    name = time.strftime("%Y%m%d-%H%M%S")
    candidates = [RUNS / name, *(RUNS / f"{name}-{number}" for number in range(2, 100))]
    return next(folder for folder in candidates if not folder.exists())


def _check_unused(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"the run folder {folder} is a file", "choose another --train.folder")
    if folder.is_dir() and any(folder.iterdir()):
        what = "holds a run" if (folder / _CONFIG).exists() else "is not empty"
        raise ConfigError(
            f"the run folder {folder} {what}; a new run would overwrite it",
            "add --resume to continue a run, or choose another --train.folder",
        )


def _newest_run() -> Path:
    runs = [folder for folder in RUNS.glob("*") if CheckpointStore(folder / _CHECKPOINTS).steps()]
    if not runs:
        raise CheckpointError(
            f"there is no run with a checkpoint in {RUNS.resolve()}",
            "name the run: --resume PATH, or --train.folder PATH --resume",
        )
    return max(runs, key=lambda folder: (folder.stat().st_mtime, folder.name))


def _at_path(path: Path) -> tuple[Path, Snapshot]:
    """Return the run's folder and the snapshot for a checkpoint, a run, or a run's checkpoints."""
    if step_of(path) is not None:
        in_run = path.parent.name == _CHECKPOINTS
        return (path.parent.parent if in_run else _fresh_folder()), load_snapshot(path)
    folder = path.parent if path.name == _CHECKPOINTS else path
    if not (folder / _CHECKPOINTS).is_dir():
        raise CheckpointError(
            f"{path} is neither a run nor a checkpoint", "give a folder like runs/NAME or …/checkpoints/step-000200"
        )
    return folder, CheckpointStore(folder / _CHECKPOINTS).latest_good()[0]
