"""A run behind a damaged checkpoint: what is in its way goes aside, and what it saves stays."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeloom.archive.verify import faults_of
from pipeloom.checkpoint import CheckpointStore, Saver, load_checkpoint, load_snapshot, save_checkpoint
from pipeloom.errors import CheckpointError, PipeloomWarning
from tests.archive.samples import RankThread, flip_bit, run_ranks
from tests.checkpoint.test_own_loop import PartOfPipe, Run, adamw, milestones


@pytest.fixture
def make() -> Iterator[Callable[[int], Run]]:
    """Makes a run of a seed."""
    made: list[Run] = []

    def one(seed: int) -> Run:
        made.append(Run(seed, 2, "1f1b", adamw, milestones))
        return made[-1]

    yield one
    for run in made:
        run.pipe.close()


def load_behind(store: CheckpointStore, run: Run, passed: str, moved: str) -> None:
    with (
        pytest.warns(PipeloomWarning, match=f"passed over a damaged checkpoint: .*{passed}"),
        pytest.warns(PipeloomWarning, match=moved),
    ):
        run.load(store)


@pytest.fixture
def damaged(make: Callable[[int], Run], tmp_path: Path) -> CheckpointStore:
    """Of steps 1 to 3, kept 1 at a time from now on; 3 has a flipped bit."""
    store, run = CheckpointStore(tmp_path / "store", num_kept=1), make(0)
    for _ in range(3):
        run.step()
        run.save(CheckpointStore(store.folder, num_kept=3))
    flip_bit(store.path_of(3) / "stage-000.safetensors", -1)
    return store


@pytest.mark.parametrize("is_saver", [False, True])
def test_run_behind_a_damaged_checkpoint_saves_as_any_other(
    make: Callable[[int], Run], damaged: CheckpointStore, is_saver: bool
) -> None:
    """A loop went on from step 2 past a damaged 3: each restart ended at "step-000003 exists already", for ever."""
    run = make(1)
    load_behind(damaged, run, "step-000003", "after step 2 were moved")
    for step_index in (3, 4):
        run.step()
        with Saver(damaged) as saver:
            run.save(saver if is_saver else damaged)
        assert damaged.steps() == [step_index]
    assert load_snapshot(damaged.path_of(4)).step_index == 4
    assert CheckpointStore(damaged.folder / "set-aside-1").steps() == [3]


@pytest.mark.parametrize("is_saver", [False, True])
def test_step_before_a_damaged_one_is_kept(
    make: Callable[[int], Run], damaged: CheckpointStore, is_saver: bool
) -> None:
    """Only that checkpoint's path was given, so 3 stays; the newest of two, it used to push out each good one."""
    run = make(1)
    run.load(damaged.path_of(1))
    run.step()
    damaged.path_of(2).rename(damaged.folder / "elsewhere")
    with Saver(damaged) as saver:
        run.save(saver if is_saver else damaged)
    assert damaged.steps() == [2, 3]
    assert load_snapshot(damaged.path_of(2)).step_index == 2


def test_load_that_fails_moves_nothing(make: Callable[[int], Run], damaged: CheckpointStore) -> None:
    """A loop that had got a scaler was started on an old store by mistake, which has to be as before."""
    run = make(0)
    with (
        pytest.warns(PipeloomWarning, match="passed over"),
        pytest.raises(CheckpointError, match="saved without the state of the scaler"),
    ):
        load_checkpoint(damaged, run.pipe, scaler=torch.amp.GradScaler("cpu"))
    assert damaged.steps() == [1, 2, 3]


def test_store_that_refuses_is_read_all_the_same(
    make: Callable[[int], Run], damaged: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's run is only looked at, from a disk that is mounted read-only."""

    def refuse(*_: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("pipeloom.archive.steps.Path.mkdir", refuse)
    run = make(1)
    load_behind(damaged, run, "step-000003", "cannot be moved out of the way: read-only; a save of such a step")
    assert run.pipe.step_index == 2
    assert damaged.steps() == [1, 2, 3]


def test_every_rank_is_told_what_was_in_the_way(tmp_path: Path) -> None:
    """Rank 0 moves what is damaged, all wait for it before they save, and the output of each says where it went."""
    whole = {f"{number}.weight": nn.Parameter(torch.ones(2)) for number in range(4)}
    store = CheckpointStore(tmp_path / "store", num_kept=3)
    for step_index in (5, 7):
        run_ranks(2, lambda group, step=step_index: save_at(step, store, PartOfPipe(whole, group)))
    flip_bit(store.path_of(7) / "stage-001.safetensors", -1)

    def go_on(group: RankThread) -> None:
        pipe = PartOfPipe(whole, group)
        load_checkpoint(store, pipe)
        save_at(7, store, pipe)

    with pytest.warns(PipeloomWarning) as caught:
        assert run_ranks(2, go_on) == [None, None]
    assert ["set-aside-1" in str(each.message) for each in caught].count(True) == 2
    assert faults_of(store.path_of(7)) == []


def save_at(step_index: int, store: CheckpointStore, pipe: PartOfPipe) -> None:
    pipe.step_index = step_index
    save_checkpoint(store, pipe)
