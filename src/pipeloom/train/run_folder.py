"""Where a run lives, and where a run goes on from.

A fixed output folder means that the second run destroys the first. Here a new run takes a folder that is
empty or not there yet, a resumed run goes on in its own, and nothing that a run has written is overwritten:
checkpoints later than the one that it continues from, and the metrics of steps that are run again, are moved aside.

Where several processes train together, the first one looks around and decides, and the others are told. A run that a
launcher starts again goes on in its own folder from the newest good checkpoint there, whatever the command line says.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pipeloom.checkpoint import Alone, CheckpointStore, Group, Opened, step_of
from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.launch.together import from_first, together
from pipeloom.train.config import Layer, TrainingConfig, resolve, to_toml
from pipeloom.train.metrics import set_repeated_aside

_RUNS = Path("runs")
_CONFIG = "config.toml"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Place:
    """Where a run lives and what it goes on from, as the first rank found it.

    Attributes:
        folder: the run's.
        checkpoint: the one to go on from, or None.
        run: the run whose newest good checkpoint is the one, or None. If the run is started again and has none yet,
            ``checkpoint`` is.
        began_at: the step at which the run began, if a launcher starts it again.
    """

    folder: str
    checkpoint: str | None = None
    run: str | None = None
    began_at: int | None = None


@dataclass(frozen=True)
class Start:
    """What a run begins from.

    Attributes:
        config: resolved; ``config.train.folder`` is the run's folder.
        checkpoint: the state to go on from, or None.
        notes: what the user should know about how it was found.
        began_at: the step at which the run began, if a launcher starts it again.
    """

    config: TrainingConfig
    checkpoint: Opened | None = None
    notes: tuple[str, ...] = ()
    began_at: int | None = None

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.train.folder)

    @property
    def store(self) -> CheckpointStore:
        """The run's checkpoints."""
        return store_of(self.folder)

    @property
    def step_index(self) -> int:
        """Steps that are completed already."""
        return self.checkpoint.step_index if self.checkpoint else 0

    @property
    def origin(self) -> dict[str, Any]:
        """What `find_start` needs to know if the run is started again."""
        checkpoint = str(self.checkpoint.folder) if self.checkpoint else None
        return {"folder": str(self.folder), "checkpoint": checkpoint, "began_at": self.step_index}

    @property
    def is_again(self) -> bool:
        """Whether a launcher starts the run again."""
        return self.began_at is not None

    @property
    def is_under_way(self) -> bool:
        """Whether it has come further than where it began."""
        return self.began_at is not None and self.step_index > self.began_at


def store_of(folder: Path) -> CheckpointStore:
    """Return the checkpoints of the run in ``folder``."""
    return CheckpointStore(folder / "checkpoints")


def find_start(
    resume: str | None,
    layers: Sequence[Layer],
    group: Group | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Start:
    """Resolve the configuration, and find the checkpoint to go on from; collective.

    Args:
        resume: None for a new run, a run or a checkpoint to continue, or "" for the newest one of the run in
            ``train.folder``, by default of the newest run.
        layers: configuration from files and flags; a saved run's own lies under them.
        group: the ranks that train together; the first one's file system and layers count.
        origin: of the same run, which is started again.

    Raises:
        ConfigError: a bad key or value, or a new run in a folder that is in use.
        CheckpointError: nothing to continue from, or it is damaged.
        SaidElsewhere: another rank raises one of these.
    """
    group = group or Alone()
    place = Place(**from_first(group, "the run's folder", lambda: vars(_place(resume, layers, origin))))
    checkpoint, notes = together(group, "the checkpoint", lambda: _opened(place, group))

    def resolved() -> Any:
        under = [] if checkpoint is None else [Layer("the configuration of the checkpoint", _configuration(checkpoint))]
        return _in_folder(resolve([*under, *layers]), Path(place.folder)).model_dump(mode="json")

    config = TrainingConfig.model_validate(from_first(group, "the configuration", resolved))
    return Start(config, checkpoint, notes, place.began_at)


def prepare_folder(start: Start) -> tuple[str, ...]:
    """Create the run's folder, or make room in it, and save the resolved configuration there.

    Returns:
        What the user should know: what was moved aside.
    """
    folder, text, notes = start.folder, to_toml(start.config), []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _CONFIG
        if path.exists() and path.read_text(encoding="utf-8") != text:
            path = folder / f"config-from-step-{start.step_index:06d}.toml"
        path.write_text(text, encoding="utf-8")
        start.store.remove_remains()
        if (start.checkpoint or start.is_again) and (aside := start.store.set_aside_after(start.step_index)):
            notes.append(f"checkpoints after step {start.step_index} were moved to {aside}")
        set_repeated_aside(folder / METRICS, start.step_index)
    except OSError as error:
        raise ConfigError(f"cannot use the run folder {folder}: {error}", "choose another --train.folder") from None
    return tuple(notes)


def _place(resume: str | None, layers: Sequence[Layer], origin: Mapping[str, Any] | None) -> Place:
    given = _given_folder(layers)
    if origin is not None:
        return Place(**origin, run=origin["folder"])
    if resume is None:
        resolve(layers)  # a misspelt key is said before a folder in use
        return Place(str(_unused(given or _fresh_folder())))
    place = _found(Path(resume)) if resume else _run(given or _newest_run())
    if given and given.resolve() != Path(place.folder).resolve():
        return Place(str(_unused(given)), place.checkpoint, place.run)
    return place


def _opened(place: Place, group: Group) -> tuple[Opened | None, tuple[str, ...]]:
    if place.run is not None:
        try:
            found, faults = Opened.newest(store_of(Path(place.run)), group)
            return found, tuple(f"passed over a damaged checkpoint: {fault.message}" for fault in faults)
        except CheckpointError:
            if place.began_at is None:
                raise
    return (Opened.at(Path(place.checkpoint), group), ()) if place.checkpoint else (None, ())


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


def _configuration(checkpoint: Opened) -> Mapping[str, Any]:
    """What of a checkpoint only `pipeloom train` saves."""
    if {"config", "position", "fingerprint"} <= checkpoint.training.keys():
        return checkpoint.training["config"]  # type: ignore[no-any-return]
    raise CheckpointError(
        f"the checkpoint {checkpoint.folder} was not saved by pipeloom train",
        "go on with the loop that saved it: pipeloom.checkpoint.load_checkpoint",
    )


def _run(folder: Path) -> Place:
    return Place(str(folder), run=str(folder))


def _found(path: Path) -> Place:
    """Return the place that a checkpoint, a run, or a run's checkpoints are."""
    if step_of(path) is not None:
        run = path.resolve().parent.parent
        return Place(str(run if (run / _CONFIG).exists() else _fresh_folder()), checkpoint=str(path))
    folder = path.parent if path.name == "checkpoints" else path
    if not store_of(folder).folder.is_dir():
        hint = "give a folder like runs/NAME or runs/NAME/checkpoints/step-000200"
        raise CheckpointError(f"{path} is neither a run nor a checkpoint", hint)
    return _run(folder)
