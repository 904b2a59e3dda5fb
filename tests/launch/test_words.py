"""What a rank leaves for its launcher is whole, the first word counts, and the cause is the one that says most."""

import json
from pathlib import Path

import pytest

from pipeloom.errors import PeerFailed
from pipeloom.launch.words import Ended, Words, record_failure
from pipeloom.peers import Cause

LOST = Cause(1, "lost", "last heard of in step 3", "rank 1 (pid 7 on here) is gone: its process ended without a word")


@pytest.fixture
def words(tmp_path: Path) -> Words:
    return Words(tmp_path)


def rank_folder(words: Words, attempt: int, rank: int) -> Path:
    folder = words.folder / "run_x" / f"attempt_{attempt}" / str(rank)
    folder.mkdir(parents=True)
    return folder


def fail(words: Words, attempt: int, rank: int, error: BaseException) -> None:
    file = rank_folder(words, attempt, rank) / "error.json"
    try:
        raise error
    except BaseException as raised:
        record_failure(raised, {"TORCHELASTIC_ERROR_FILE": str(file)})


def test_first_word_counts(words: Words) -> None:
    assert words.ended is None
    words.end(Ended(2, "wrong", "mend it"))
    words.end(Ended(143))
    assert words.ended == Ended(2, "wrong", "mend it")
    assert [path.name for path in words.folder.iterdir()] == ["ended.json"], "nothing half is left"


@pytest.mark.parametrize("happens", [Words.stop, lambda words: words.end(Ended(0))])
def test_either_word_ends_what_only_starts(words: Words, happens) -> None:
    assert not words.is_over
    happens(words)
    assert words.is_over


def test_cause_is_what_the_others_say(words: Words) -> None:
    fail(words, 0, 0, ValueError("boom"))
    fail(words, 0, 1, PeerFailed("rank 1 stops", cause=LOST))
    assert words.cause(0) == LOST.line


def test_own_exception_comes_with_its_traceback(words: Words) -> None:
    fail(words, 0, 0, ValueError("boom"))
    lines = str(words.cause(0)).splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "ValueError: boom")


def test_attempts_are_told_apart(words: Words) -> None:
    fail(words, 0, 0, ValueError("first"))
    fail(words, 1, 0, ValueError("second"))
    assert str(words.cause(1)).endswith("second")
    assert words.cause(2) is None


def test_last_line_serves_where_a_rank_could_do_no_more(words: Words) -> None:
    output = f"a warning\n\n{LOST}\nrankled\n"
    (rank_folder(words, 0, 0) / "stderr.log").write_text(output)
    assert words.cause(0) == LOST.line


def test_torn_file_is_no_cause(words: Words) -> None:
    (rank_folder(words, 0, 0) / "error.json").write_text('{"message": {"mess')
    assert words.cause(0) is None


def test_failure_has_the_form_that_torchrun_prints(words: Words) -> None:
    fail(words, 0, 0, PeerFailed("rank 1 stops", cause=LOST))
    message = json.loads((words.folder / "run_x/attempt_0/0/error.json").read_text())["message"]
    assert (message["message"], message["extraInfo"]["py_callstack"]) == (LOST.line, str(LOST))
    assert int(message["extraInfo"]["timestamp"]) > 1e9


def test_without_a_launcher_nothing_is_written(words: Words) -> None:
    record_failure(ValueError("boom"), {})
    assert list(words.folder.iterdir()) == []
