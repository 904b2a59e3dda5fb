"""The launcher around small ranks: one voice, one exit code, and nobody left behind."""

import gc
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeloom.launch.agent import HANDLED, Launch
from pipeloom.launch.words import FOLDER, Ended

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from pipeloom.errors import ConfigError
from pipeloom.launch.rank import as_rank
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def note(name):
    if rank == 1: time.sleep(1.5)
    Path(f".{name}-{rank}").write_text(str(os.getpid()))
    os.rename(f".{name}-{rank}", f"{name}-{rank}")
def wait(name):
    while not Path(name).exists(): time.sleep(0.01)
def until_sigterm():
    got = []
    signal.signal(signal.SIGTERM, lambda *_: got.append(1))
    note("ready")
    while not got: time.sleep(0.01)
    return 143
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ranks work in a folder of their own, and the launcher leaves no word of itself here."""
    monkeypatch.chdir(tmp_path)
    for name in (FOLDER, "PIPELOOM_LAUNCHER_PID"):
        monkeypatch.setenv(name, "")
    return tmp_path


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """No signal is ignored, also where the tests run under nohup or in a script's background.

    Two of these tests once waited there for the end of ranks that nobody ended, as the launcher rightly left the
    signals ignored.
    """
    usual = {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, usual.get(number, signal.SIG_DFL)) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def launched(body: str, num_ranks: int = 2, max_restarts: int = 0) -> tuple[Ended, list[str]]:
    """Run ``body`` as each rank's work; return what came of it, and what the launcher has said."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    script = f"{PRELUDE}\ndef work():\n{lines}\n    return 0\nraise SystemExit(as_rank(work, 2))"
    said: list[str] = []
    with warnings.catch_warnings():
        # torch's agent leaves the files of the output open; the interpreter closes them when it finds them.
        warnings.simplefilter("ignore", ResourceWarning)
        ended = Launch([sys.executable, "-u", "-c", script], num_ranks, max_restarts, said.append).run()
        gc.collect()
    return ended, said


def when(is_time: Callable[[], bool], do: Callable[[], None]) -> threading.Thread:
    """In a thread: wait, then do it."""

    def work() -> None:
        until_s = time.monotonic() + 100
        while not is_time():
            assert time.monotonic() < until_s
            time.sleep(0.01)
        do()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def are_ready() -> bool:
    return all(Path(f"ready-{rank}").exists() for rank in range(2))


def pids() -> list[int]:
    return [int(path.read_text()) for path in Path().glob("ready-*")]


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def test_ranks_that_end_well(capfd) -> None:
    ended, said = launched("note(os.environ['WORLD_SIZE'] + os.environ['OMP_NUM_THREADS'])", num_ranks=3)
    assert (ended, said) == (Ended(0), [])
    assert {path.name for path in Path().iterdir()} == {"31-0", "31-1", "31-2"}
    assert capfd.readouterr() == ("", "")


def test_output_is_prefixed_but_the_first_ranks(capfd) -> None:
    launched("print('step', rank); print('warning', rank, file=sys.stderr)")
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == ["[rank 1] step 1", "step 0"]
    assert sorted(printed.err.splitlines()) == ["[rank 0] warning 0", "[rank 1] warning 1"]


def test_wrong_value_is_said_once_and_not_tried_again() -> None:
    ended, said = launched("note(f'attempt-{attempt}'); raise ConfigError('wrong', 'mend it')", max_restarts=3)
    assert (ended, said) == (Ended(2, "wrong", "mend it"), [])
    assert not list(Path().glob("attempt-1-*"))


def test_failure_is_told_with_its_traceback_last() -> None:
    ended, said = launched("if rank: raise ValueError('boom')\nuntil_sigterm()")
    assert (ended.code, said) == (1, [])
    assert ended.message.startswith("Traceback (most recent call last):")
    assert ended.message.splitlines()[-1] == "ValueError: boom"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("os.kill(os.getpid(), 9) if rank else until_sigterm()", r"rank 1 \(pid \d+\) was killed by SIGKILL"),
        ("os._exit(7) if rank else until_sigterm()", r"rank 1 \(pid \d+\) left with code 7"),
        ("os._exit(7) if rank else signal.pause()", r"rank 1 \(pid \d+\) left with code 7"),
        (
            "if rank: print('rank 1, step 3: gone', file=sys.stderr); os._exit(1)\nuntil_sigterm()",
            "rank 1, step 3: gone",
        ),
    ],
)
def test_rank_that_can_say_nothing_is_named(body: str, message: str) -> None:
    ended, _ = launched(body)
    assert ended.code == 1
    assert re.match(message, ended.message)


def test_failed_ranks_are_started_again_and_it_is_said_why() -> None:
    """Rank 1 once failed before rank 0 had left its note, which the launcher's SIGTERM then prevented."""
    failing = "if rank: wait(f'attempt-{attempt}-0'); raise ValueError(f'boom {attempt}')"
    body = f"note(f'attempt-{{attempt}}')\nif attempt == 2: return 0\n{failing}"
    ended, said = launched(f"{body}\nuntil_sigterm()", max_restarts=2)
    assert ended == Ended(0)
    assert [each.splitlines()[-2:] for each in said] == [
        [f"ValueError: boom {attempt}", f"starting again, {attempt + 1} of 2 times"] for attempt in range(2)
    ]
    assert len(list(Path().glob("attempt-*"))) == 6


def test_used_up_restarts_end_with_the_last_cause() -> None:
    ended, said = launched("if rank: raise ValueError(f'boom {attempt}')\nuntil_sigterm()", max_restarts=1)
    assert (ended.code, ended.message.splitlines()[-1]) == (1, "ValueError: boom 1")
    assert len(said) == 1


def test_ranks_killed_together_are_started_again() -> None:
    ended, said = launched("attempt or os.kill(os.getpid(), 9)", max_restarts=1)
    assert (ended, said) == (Ended(0), ["a process ended without a word\nstarting again, 1 of 1 times"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_first_signal_lets_the_ranks_finish(number: signal.Signals, code: int) -> None:
    before = [signal.getsignal(each) for each in HANDLED]
    when(are_ready, send(number))
    ended, said = launched("code = until_sigterm()\nnote('finished')\nreturn code", max_restarts=3)
    assert (ended, said) == (Ended(code), ["stopping after this step; a second signal ends at once"])
    assert Path("finished-0").exists()
    assert Path("finished-1").exists()
    assert [signal.getsignal(each) for each in HANDLED] == before


def test_second_signal_ends_ranks_that_do_not() -> None:
    def twice() -> None:
        send(signal.SIGINT)()
        when(lambda: Path("asked-0").exists(), send(signal.SIGTERM))

    when(are_ready, twice)
    ended, _ = launched("until_sigterm()\nnote('asked')\nwhile True: signal.pause()", max_restarts=3)
    assert ended == Ended(130, "stopped before all ranks could save")
    assert [pid for pid in pids() if Path(f"/proc/{pid}").exists()] == []


def test_signal_while_ranks_only_start() -> None:
    """They have no handler yet, and a new attempt must not begin."""
    when(are_ready, send(signal.SIGTERM))
    ended, _ = launched("note('ready')\nnote(f'attempt-{attempt}')\nwhile True: signal.pause()", max_restarts=3)
    assert ended == Ended(143, "stopped before all ranks could save")
    assert not list(Path().glob("attempt-1-*"))
    assert [pid for pid in pids() if Path(f"/proc/{pid}").exists()] == []


def test_failure_after_a_signal_is_a_failure() -> None:
    when(are_ready, send(signal.SIGTERM))
    ended, _ = launched("until_sigterm()\nraise ValueError('boom')")
    assert (ended.code, ended.message.splitlines()[-1]) == (1, "ValueError: boom")


def test_wrong_value_after_a_signal_is_told() -> None:
    when(are_ready, send(signal.SIGTERM))
    ended, _ = launched("until_sigterm()\nraise ConfigError('the disk is full')")
    assert ended == Ended(2, "the disk is full")


def test_rank_that_got_the_signal_itself_speaks_for_all() -> None:
    when(are_ready, lambda: [os.kill(pid, signal.SIGTERM) for pid in pids()])
    ended, said = launched("return until_sigterm()", max_restarts=3)
    assert (ended, said) == (Ended(143), [])


def test_ignored_signal_stays_ignored() -> None:
    """As under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ended, _ = launched(f"rank or os.kill({os.getpid()}, signal.SIGHUP)")
        assert ended == Ended(0)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_nothing_is_left_in_the_temporary_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    launched("return 0")
    assert list(folder.iterdir()) == []
