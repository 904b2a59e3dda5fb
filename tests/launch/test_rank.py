"""A rank under a launcher says nothing and leaves word; without one it is as if nothing was there."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeloom.errors import ConfigError, PeerFailed, PipeloomError, SaidElsewhere
from pipeloom.launch.rank import as_rank, is_launched
from pipeloom.launch.words import FOLDER, LAUNCHER, Ended, Words
from pipeloom.peers import Cause

PEER = PeerFailed("rank 0 stops", cause=Cause(1, "lost", "at the start", "is gone"))


def raising(error: BaseException):
    def run() -> int:
        raise error

    return run


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Words:
    """This process is a rank, and its parent the launcher."""
    monkeypatch.setattr("pipeloom.launch.rank._end_with_launcher", lambda launcher: None)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return Words(tmp_path)


@pytest.mark.parametrize(
    ("run", "ended"),
    [
        (lambda: 0, None),
        (lambda: 143, Ended(143)),
        (raising(ConfigError("wrong", "mend it")), Ended(2, "wrong", "mend it")),
        (raising(KeyboardInterrupt()), Ended(130)),
        (raising(BrokenPipeError()), Ended(141)),
        (raising(SaidElsewhere("rank 0: wrong")), None),
    ],
)
def test_end_on_purpose_is_left_for_the_launcher(words: Words, run, ended: Ended | None) -> None:
    assert as_rank(run, 2) == 0
    assert words.ended == ended
    assert not (words.folder / "error.json").exists()


@pytest.mark.parametrize("error", [ValueError("boom"), PEER])
def test_failure_is_recorded_and_not_printed(words: Words, error: Exception, capsys) -> None:
    assert as_rank(raising(error), 2) == 1
    assert words.ended is None
    assert (words.folder / "error.json").exists()
    assert capsys.readouterr() == ("", "")


def test_rank_that_starts_after_the_end_does_nothing(words: Words) -> None:
    words.stop()
    assert as_rank(raising(AssertionError("it must not run")), 2) == 0
    assert words.ended == Ended(0)


def test_word_of_the_launcher_is_not_handed_on(words: Words) -> None:
    assert is_launched()
    assert as_rank(lambda: int(is_launched() or LAUNCHER in os.environ), 2) == 0
    assert words.ended is None


@pytest.mark.parametrize(("run", "code"), [(lambda: 143, 143), (raising(SaidElsewhere("wrong")), 2)])
def test_without_a_launcher_codes_are_plain(run, code: int) -> None:
    assert not is_launched()
    assert as_rank(run, 2) == code


@pytest.mark.parametrize("error", [ConfigError("wrong"), ValueError("boom"), PEER, KeyboardInterrupt("twice")])
def test_without_a_launcher_errors_go_on(error: BaseException) -> None:
    with pytest.raises(type(error), match=str(error.args[0])):
        as_rank(raising(error), 2)


def test_torchrun_is_told_of_failures_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(PipeloomError, match="wrong"):
        as_rank(raising(ConfigError("wrong")), 2)
    assert not file.exists()
    with pytest.raises(ValueError, match="boom"):
        as_rank(raising(ValueError("boom")), 2)
    assert file.exists()


LAUNCHER_THAT_IS_KILLED = """
import os, subprocess, sys
os.environ["PIPELOOM_LAUNCHER_PID"] = str(os.getpid())
rank = "import time; from pipeloom.launch.rank import as_rank; "
rank += "as_rank(lambda: (print('here', flush=True), time.sleep(600))[1], 2)"
child = subprocess.Popen([sys.executable, "-c", rank], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {FOLDER: str(tmp_path)}
    command = [sys.executable, "-c", LAUNCHER_THAT_IS_KILLED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == -9
    until_s = time.monotonic() + 60
    while is_running(int(done.stdout)) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not is_running(int(done.stdout))


def is_running(pid: int) -> bool:
    """A zombie, which nobody has asked for its code, runs no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
