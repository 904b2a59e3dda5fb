"""Checkpoints of a loop of one's own, around a pipeline of one process or of many.

Saving ``state_dict()`` of everything binds a checkpoint to one cut: an optimizer numbers its parameters, a rank has
only its own. Here everything goes by the whole model's names, and each rank takes what it holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeloom.archive.group import ALONE, Group, gather_json
from pipeloom.archive.steps import set_aside
from pipeloom.checkpoint.compare import check_same_model
from pipeloom.checkpoint.opened import Opened
from pipeloom.checkpoint.optimizer import (
    hyperparameters,
    load_hyperparameters,
    load_optimizer_state,
    optimizer_state,
)
from pipeloom.checkpoint.saver import Saver
from pipeloom.checkpoint.snapshot import Layout, Snapshot
from pipeloom.checkpoint.store import CheckpointStore, save_snapshot
from pipeloom.errors import CheckpointError, PipeloomWarning

Place = str | Path | CheckpointStore | Saver


class Stateful(Protocol):
    """A scheduler of learning rates, a gradient scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state."""
        ...


def group_of(pipe: Any) -> Group:
    """Return the ranks of a pipeline; one process is alone."""
    group: Group | None = getattr(pipe, "group", None)
    return group or ALONE


def snapshot_of(
    pipe: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    extra: Any = None,
) -> Snapshot:
    """Return this rank's part of the state between two steps; the arguments are those of `save_checkpoint`.

    Raises:
        CheckpointError: the optimizer has state of a parameter that is not the pipeline's.
    """
    parameters = dict(pipe.named_parameters())
    training = {"seed": pipe.seed, "extra": extra}
    training |= {name: stateful.state_dict() for name, stateful in _given(scheduler, scaler).items()}
    training |= {"optimizer": type(optimizer).__name__} if optimizer is not None else {}
    return Snapshot(
        step_index=pipe.step_index,
        model=pipe.state_dict(),
        optimizer=optimizer_state(optimizer, parameters) if optimizer is not None else {},
        training=training,
        groups=hyperparameters(optimizer, parameters) if optimizer is not None else (),
        layout=Layout.of(pipe),
    )


def save_checkpoint(
    place: Place,
    pipe: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    extra: Any = None,
    group: Group | None = None,
) -> Path:
    """Save all that a run needs to go on equal to the bit; every rank calls it after the same step.

    Args:
        place: a folder that does not exist yet; a `CheckpointStore`, which names it after the step and keeps the
            newest; or a `Saver`, which writes to its store in the background.
        pipe: the pipeline: its parameters and buffers, ``seed`` and ``step_index``, on which random draws depend.
        optimizer: of its parameters: state and hyperparameters, by parameter name.
        scheduler: of learning rates.
        scaler: of gradients, as `torch.amp.GradScaler`.
        extra: what else must come back, as the position in the text: numbers, text, and lists and dicts of them.
        group: the ranks that save together; by default the pipeline's. A `Saver` may have its own.

    Returns:
        The checkpoint's folder. With a `Saver` it appears later.

    Raises:
        CheckpointError: the folder exists or cannot be written, or a value cannot be saved; names it.
    """
    snapshot = snapshot_of(pipe, optimizer, scheduler=scheduler, scaler=scaler, extra=extra)
    group = group or group_of(pipe)
    if isinstance(place, Saver):
        place.save(snapshot, group)
        return place.store.path_of(snapshot.step_index)
    if isinstance(place, CheckpointStore):
        return place.save(snapshot, group=group)
    return save_snapshot(Path(place), snapshot, group)


def load_checkpoint(
    place: Place,
    pipe: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    group: Group | None = None,
) -> Any:
    """Go on from a checkpoint, whatever number of stages, ranks and processes saved it; every rank calls it.

    Args:
        place: a checkpoint's folder, or a `CheckpointStore` or `Saver`: the newest good one there. Damaged ones that
            were passed over are moved aside, as saves of their steps may follow; both are a `PipeloomWarning`.
        pipe: takes parameters, buffers, ``seed`` and ``step_index``.
        optimizer: takes its state and hyperparameters, by parameter name.
        scheduler: takes its state.
        scaler: takes its state.
        group: the ranks that load together; by default the pipeline's.

    Returns:
        What was saved as ``extra``.

    Raises:
        CheckpointError: a file is damaged (names it and the newest good checkpoint), it is of another model or
            optimizer, or it lacks what is asked for. Nothing is changed then.
    """
    group = group or group_of(pipe)
    (opened, passed), model = _opened(place, group), pipe.state_dict()
    check_same_model(opened.forms, model, opened.folder, group)
    snapshot, takers = opened.read(model), _given(scheduler, scaler)
    _check_has(opened.folder, snapshot.training, optimizer, takers)
    if optimizer is not None:
        parameters = dict(pipe.named_parameters())
        load_hyperparameters(optimizer, parameters, snapshot.groups)
        mine = {name: state for name, state in snapshot.optimizer.items() if name in parameters}
        load_optimizer_state(optimizer, parameters, mine)
    pipe.load_state_dict(snapshot.model)
    for name, taker in takers.items():
        taker.load_state_dict(snapshot.training[name])
    pipe.seed, pipe.step_index = snapshot.training.get("seed", pipe.seed), snapshot.step_index
    if passed is not None:
        _set_aside(opened, passed, group)
    return snapshot.training.get("extra")


def _given(scheduler: Stateful | None, scaler: Stateful | None) -> dict[str, Stateful]:
    both = {"scheduler": scheduler, "scaler": scaler}
    return {name: stateful for name, stateful in both.items() if stateful is not None}


def _opened(place: Place, group: Group) -> tuple[Opened, list[int] | None]:
    """Open a checkpoint; return it, and the steps that were passed over: rank 0's count. None if there are none."""
    store = place.store if isinstance(place, Saver) else place
    if not isinstance(store, CheckpointStore):
        return Opened.at(Path(store), group), None
    # Looked at before they are checked: what a run that is still going saves meanwhile is not in the way.
    steps = store.steps()
    opened, faults = Opened.newest(store, group)
    for fault in faults:
        warnings.warn(f"passed over a damaged checkpoint: {fault.message}", PipeloomWarning, stacklevel=3)
    return opened, [step for step in steps if step > opened.step_index] if faults else None


def _set_aside(opened: Opened, passed: list[int], group: Group) -> None:
    """Make room for what will be saved; collective, since no rank may save before there is room."""
    said = ""
    try:
        if group.rank == 0 and (aside := set_aside(opened.folder.parent, passed)):
            said = f"checkpoints after step {opened.step_index} were moved to {aside}: they are damaged"
    except OSError as error:
        said = (
            f"damaged checkpoints after step {opened.step_index} cannot be moved out of the way: {error}; "
            f"a save of such a step will be refused"
        )
    said, *_ = gather_json(group, said, f"what is in the way in {opened.folder.parent.name}")
    if said:
        warnings.warn(said, PipeloomWarning, stacklevel=3)


def _check_has(
    folder: Path, training: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, names: Iterable[str]
) -> None:
    for name in (*names, *(["optimizer"] if optimizer is not None else [])):
        if name not in training:
            raise CheckpointError(f"{folder} was saved without the state of the {name}", f"load without the {name}")
    given = type(optimizer).__name__
    if optimizer is not None and training["optimizer"] != given:
        raise CheckpointError(
            f"{folder} has the state of {training['optimizer']}, but the optimizer is {given}",
            "give the optimizer that it was saved with, or load without one",
        )
