"""Where a run begins: a folder of its own, and nothing written by a run is ever lost."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeloom.checkpoint import CheckpointStore, Snapshot
from pipeloom.errors import CheckpointError, ConfigError
from pipeloom.train.config import Layer, TrainingConfig, read_config_file, resolve, to_toml
from pipeloom.train.run_folder import Start, find_start, prepare_folder, store_of


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def flags(**train: Any) -> list[Layer]:
    return [Layer("command line", {"train": train})]


def make_run(folder: str, *steps: int, **train: Any) -> CheckpointStore:
    """A run with checkpoints at these steps."""
    config = resolve(flags(folder=folder, **train))
    prepare_folder(Start(config))
    for step_index in steps:
        training = {"position": 0, "fingerprint": "", "config": config.model_dump(mode="json")}
        store_of(Path(folder)).save(Snapshot(step_index, {"w": torch.ones(1)}, {}, training), num_kept=99)
    return store_of(Path(folder))


def damage(store: CheckpointStore, step_index: int) -> None:
    (store.path_of(step_index) / "stage-000.safetensors").write_bytes(b"")


def test_new_run_gets_a_folder_with_its_configuration() -> None:
    start = find_start(None, flags(folder="mine", steps=5))
    assert not Path("mine").exists()
    assert prepare_folder(start) == ()
    assert resolve([read_config_file(Path("mine/config.toml"))]) == start.config


def test_unnamed_runs_get_dated_folders_of_their_own() -> None:
    starts = []
    for _ in range(3):
        starts.append(find_start(None, []))
        prepare_folder(starts[-1])
    assert len({start.folder for start in starts}) == 3
    assert all(start.folder.parent == Path("runs") for start in starts)


@pytest.mark.parametrize(
    ("name", "message"),
    [("config.toml", "the run folder used holds a run; a new run would overwrite it"), ("notes", "is not an empty")],
)
def test_folder_in_use_is_refused_and_left_alone(name: str, message: str) -> None:
    Path("used").mkdir()
    (Path("used") / name).write_text("precious")
    with pytest.raises(ConfigError, match=message) as caught:
        find_start(None, flags(folder="used"))
    caught.match("hint: add --resume to continue a run, or choose another --train.folder")
    assert (Path("used") / name).read_text() == "precious"


def test_empty_folder_is_taken_and_a_file_is_not() -> None:
    Path("empty").mkdir()
    Path("file").write_text("")
    assert find_start(None, flags(folder="empty")).folder == Path("empty")
    with pytest.raises(ConfigError, match="file is not an empty folder"):
        find_start(None, flags(folder="file"))


def test_folder_that_cannot_be_made_is_named() -> None:
    Path("file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot use the run folder file/run: .*Not a directory"):
        prepare_folder(Start(resolve(flags(folder="file/run"))))


@pytest.mark.parametrize("resume", ["run", "run/checkpoints", "run/checkpoints/step-000004", ""])
def test_every_way_to_name_the_newest_checkpoint(resume: str) -> None:
    make_run("run", 2, 4, steps=6)
    start = find_start(resume, flags(folder="run") if resume == "" else [])
    assert start.checkpoint is not None
    assert (start.checkpoint.step_index, start.folder.resolve()) == (4, Path("run").resolve())
    assert start.config.train.steps == 6


def test_unnamed_resume_takes_the_newest_run() -> None:
    for age_s, name in enumerate(["newest", "older", "oldest"]):
        checkpoint = make_run(f"runs/{name}", 3).path_of(3)
        os.utime(checkpoint, (1e9 - age_s, 1e9 - age_s))
    make_run("runs/without-checkpoint")
    assert find_start("", []).folder == Path("runs/newest")


def test_flags_win_over_the_saved_configuration() -> None:
    make_run("run", 4, steps=6, batch_size=16)
    layers = [Layer("command line", {"train": {"steps": "9"}, "pipeline": {"num_microbatches": "16"}})]
    config = find_start("run", layers).config
    assert (config.train.steps, config.train.batch_size, config.pipeline.num_microbatches) == (9, 16, 16)


def test_damaged_newest_is_passed_over_with_a_note() -> None:
    damage(make_run("run", 2, 4), 4)
    start = find_start("run", [])
    assert start.checkpoint is not None
    assert start.checkpoint.step_index == 2
    assert "passed over a damaged checkpoint: run/checkpoints/step-000004/stage-000.safetensors" in start.notes[0]


def test_damaged_checkpoint_that_is_named_is_refused() -> None:
    damage(make_run("run", 2, 4), 4)
    with pytest.raises(CheckpointError, match=r"step-000004/stage-000\.safetensors is truncated") as caught:
        find_start("run/checkpoints/step-000004", [])
    assert "beside it is run/checkpoints/step-000002: continue from that one" in str(caught.value.hint)


def test_going_on_from_earlier_keeps_the_later_ones() -> None:
    make_run("run", 2, 4, 6)
    (note,) = prepare_folder(find_start("run/checkpoints/step-000002", []))
    assert store_of(Path("run")).steps() == [2]
    assert CheckpointStore(Path("run/checkpoints/set-aside-1")).steps() == [4, 6]
    assert "after step 2 were moved to" in note


def test_another_folder_makes_a_branch() -> None:
    make_run("run", 2, 4)
    start = find_start("run/checkpoints/step-000002", flags(folder="branch"))
    assert prepare_folder(start) == ()
    assert start.folder == Path("branch")
    assert store_of(Path("run")).steps() == [2, 4]


def test_branch_into_another_run_is_refused() -> None:
    make_run("run", 2)
    make_run("other", 9)
    with pytest.raises(ConfigError, match="the run folder other holds a run"):
        find_start("run", flags(folder="other"))


def test_loose_checkpoint_starts_a_run_of_its_own() -> None:
    make_run("run", 2).path_of(2).rename("step-000002")
    start = find_start("step-000002", [])
    assert start.folder.parent == Path("runs")
    assert start.checkpoint is not None


def test_changed_configuration_is_saved_beside_the_first() -> None:
    make_run("run", 2, steps=6)
    first = Path("run/config.toml").read_text()
    start = find_start("run", flags(steps=8))
    prepare_folder(start)
    assert Path("run/config.toml").read_text() == first
    assert Path("run/config-from-step-000002.toml").read_text() == to_toml(start.config)


def test_unchanged_configuration_is_saved_once() -> None:
    make_run("run", 2)
    prepare_folder(find_start("run", []))
    assert sorted(path.name for path in Path("run").iterdir()) == ["checkpoints", "config.toml"]


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("nowhere", "nowhere is neither a run nor a checkpoint"),
        ("nowhere/checkpoints/step-000003", r"cannot read nowhere/.*/manifest\.json"),
        ("", "there is no run with a checkpoint in .*runs"),
        ("bare", "there is no checkpoint to continue from in bare/checkpoints"),
    ],
)
def test_nothing_to_continue_is_said(resume: str, message: str) -> None:
    Path("bare/checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=message):
        find_start(resume, [])


def test_checkpoint_of_another_loop_is_refused() -> None:
    store_of(Path("other")).save(Snapshot(2, {"w": torch.ones(1)}, {}, {"seed": 0, "extra": None}))
    with pytest.raises(
        CheckpointError, match="the checkpoint other/checkpoints/step-000002 was not saved by pipeloom train"
    ) as caught:
        find_start("other", [])
    assert "load_checkpoint" in str(caught.value.hint)


def test_resumed_run_removes_what_killed_saves_left() -> None:
    store = make_run("run", 2)
    (store.folder / ".tmp-step-000003-0123abcd").mkdir()
    prepare_folder(find_start("run", []))
    assert [path.name for path in store.folder.iterdir()] == ["step-000002"]


def test_bad_flag_is_found_on_a_resume_too() -> None:
    make_run("run", 2)
    with pytest.raises(ConfigError, match=r"command line: there is no key 'train\.stps'"):
        find_start("run", flags(stps=3))


def test_defaults_are_the_lowest_layer() -> None:
    assert find_start(None, flags(folder="x")).config.optimizer == TrainingConfig().optimizer


def test_run_that_is_started_again_goes_on_in_its_own_folder() -> None:
    origin = find_start(None, flags(folder="run", steps=9)).origin
    make_run("run", 2, 4, steps=9)
    start = find_start(None, flags(folder="run", steps=9), origin=origin)
    assert (start.step_index, start.folder, start.is_under_way) == (4, Path("run"), True)
    assert prepare_folder(start) == ()


@pytest.mark.parametrize("is_prepared", [False, True])
def test_run_without_a_checkpoint_is_started_from_its_beginning(is_prepared: bool) -> None:
    first = find_start(None, flags(folder="run"))
    if is_prepared:
        prepare_folder(first)
        Path("run/metrics.jsonl").write_text('{"kind": "step", "step": 1}\n')
    start = find_start(None, flags(folder="run"), origin=first.origin)
    assert (start.checkpoint, start.config) == (None, first.config)
    assert prepare_folder(start) == ()
    assert not is_prepared or Path("run/metrics.jsonl").read_text() == ""


def test_branch_without_a_checkpoint_is_started_from_its_root() -> None:
    make_run("run", 2, 4)
    first = find_start("run/checkpoints/step-000002", flags(folder="branch"))
    prepare_folder(first)
    start = find_start("run/checkpoints/step-000002", flags(folder="branch"), origin=first.origin)
    assert (start.step_index, start.folder, start.is_under_way) == (2, Path("branch"), False)
    make_run("branch", 7)
    again = find_start("run/checkpoints/step-000002", flags(folder="branch"), origin=first.origin)
    assert (again.step_index, again.folder, again.is_under_way) == (7, Path("branch"), True)


def test_run_of_no_name_is_found_again() -> None:
    first = find_start(None, flags())
    prepare_folder(first)
    assert find_start(None, flags(), origin=first.origin).folder == first.folder


def test_damaged_checkpoints_of_a_run_that_starts_again_make_way() -> None:
    first = find_start(None, flags(folder="run"))
    damage(make_run("run", 2), 2)
    start = find_start(None, flags(folder="run"), origin=first.origin)
    assert start.step_index == 0
    assert prepare_folder(start) == ("checkpoints after step 0 were moved to run/checkpoints/set-aside-1",)


def test_newest_run_is_not_looked_for_again() -> None:
    make_run("runs/mine", 3)
    origin = find_start("", []).origin
    make_run("runs/other", 9)
    assert find_start("", [], origin=origin).folder == Path("runs/mine")
