"""Folders of steps: their order, which ones go, which ones are put aside."""

from pathlib import Path

import pytest

from pipeloom.archive.steps import folder_of, keep_newest, set_aside, set_aside_after, step_of, steps_in


def make(store: Path, *steps: int) -> Path:
    for step_index in steps:
        folder_of(store, step_index).mkdir(parents=True)
        (folder_of(store, step_index) / "manifest.json").write_text("{}")
    return store


@pytest.mark.parametrize("step_index", [0, 1, 999_999, 1_000_000])
def test_name_of_a_step_is_read_back(step_index: int) -> None:
    assert step_of(folder_of(Path("store"), step_index)) == step_index


@pytest.mark.parametrize("name", [".tmp-step-000400", "step-12", "step-abcdef", "set-aside-1", "step-000001x", ""])
def test_other_names_are_no_steps(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(exist_ok=True)
    assert step_of(Path(name)) is None
    assert steps_in(tmp_path) == []


def test_steps_sort_as_numbers(tmp_path: Path) -> None:
    assert steps_in(make(tmp_path, 1_000_000, 999_999, 3)) == [3, 999_999, 1_000_000]
    assert steps_in(tmp_path / "nothing") == []


@pytest.mark.parametrize(("num_kept", "left"), [(1, [3]), (2, [2, 3]), (9, [1, 2, 3])])
def test_oldest_go_beyond_the_kept(tmp_path: Path, num_kept: int, left: list[int]) -> None:
    keep_newest(make(tmp_path, 1, 2, 3), num_kept, 3)
    assert steps_in(tmp_path) == left


@pytest.mark.parametrize(("num_kept", "left"), [(1, [6, 10, 12]), (2, [5, 6, 10, 12]), (3, [4, 5, 6, 10, 12])])
def test_later_steps_push_out_nothing(tmp_path: Path, num_kept: int, left: list[int]) -> None:
    """A run went back to step 5, since 10 and 12 are damaged. Counted as newest, they pushed out the new 6 at once."""
    keep_newest(make(tmp_path, 3, 4, 5, 6, 10, 12), num_kept, 6)
    assert steps_in(tmp_path) == left


def test_manifest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash leaves half removed cannot pass for a checkpoint."""

    def crash(path: Path) -> None:
        raise OSError(f"the disk went away at {path.name}")

    monkeypatch.setattr("pipeloom.archive.steps.shutil.rmtree", crash)
    with pytest.raises(OSError, match="at step-000001"):
        keep_newest(make(tmp_path, 1, 2), 1, 2)
    assert not (folder_of(tmp_path, 1) / "manifest.json").exists()
    assert (folder_of(tmp_path, 2) / "manifest.json").exists()


def test_later_ones_are_put_aside_each_time_in_a_folder_of_their_own(tmp_path: Path) -> None:
    first = set_aside_after(make(tmp_path, 1, 2, 3), 1)
    assert first is not None
    assert (steps_in(tmp_path), steps_in(first)) == ([1], [2, 3])
    second = set_aside_after(make(tmp_path, 2), 1)
    assert second != first
    assert set_aside_after(tmp_path, 1) is None


@pytest.mark.parametrize(
    ("there", "expected"),
    [([], "set-aside-1"), (["set-aside-2"], "set-aside-3"), (["set-aside-9", "set-aside-10"], "set-aside-11")],
)
@pytest.mark.parametrize("others", [[], ["set-aside-mine", "set-aside-"]])
def test_number_of_what_is_put_aside_is_free(
    tmp_path: Path, there: list[str], others: list[str], expected: str
) -> None:
    """A user deleted set-aside-1, to make room; counting the rest, the next one should have been a second number 2."""
    for name in (*there, *others):
        (tmp_path / name).mkdir()
    aside = set_aside(make(tmp_path, 7), [7])
    assert aside == tmp_path / expected
    assert steps_in(aside) == [7]


def test_only_what_is_asked_for_is_put_aside(tmp_path: Path) -> None:
    """What another process has saved meanwhile stays, and what it has removed is not missed."""
    aside = set_aside(make(tmp_path, 1, 2, 4), [2, 3])
    assert aside is not None
    assert (steps_in(tmp_path), steps_in(aside)) == ([1, 4], [2])
    assert set_aside(tmp_path, [3]) is None
