"""Ranks before they have a pipeline: the first one decides, one's fault is everybody's, and is said once."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pipeloom.errors import ConfigError, PeerFailed, ProcessError, SaidElsewhere
from pipeloom.launch.together import Job, NoJob, find_job, from_first, gathered, num_started, together


class Board:
    """A store that threads share."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def on_ranks(num_ranks: int, work: Callable[[Job], Any], board: Board | None = None, attempt: int = 0) -> list[Any]:
    """What each rank returns or raises."""
    board = board or Board()

    def result(rank: int) -> Any:
        try:
            return work(Job(board, rank, num_ranks, attempt, limit_s=60))
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(result, range(num_ranks)))


def fails_on(job: Job, *ranks: int) -> int:
    if job.rank in ranks:
        raise ConfigError(f"wrong on {job.rank}", "mend it")
    return job.rank


def test_every_rank_hears_all_in_order() -> None:
    heard = on_ranks(3, lambda job: [job.all_gather(f"{job.rank}{turn}".encode(), "a test") for turn in range(2)])
    assert heard == [[[b"00", b"10", b"20"], [b"01", b"11", b"21"]]] * 3


def test_first_rank_decides() -> None:
    assert on_ranks(3, lambda job: from_first(job, "a choice", lambda: {"rank": job.rank})) == [{"rank": 0}] * 3


def test_what_is_made_together_is_each_ranks_own() -> None:
    assert on_ranks(2, lambda job: together(job, "a thing", lambda: object() and job.rank)) == [0, 1]


@pytest.mark.parametrize(("failing", "speaker"), [((0,), 0), ((1,), 1), ((2, 1), 1), ((0, 1, 2), 0)])
def test_one_rank_says_it_for_all(failing: tuple[int, ...], speaker: int) -> None:
    results = on_ranks(3, lambda job: gathered(job, "a thing", lambda: fails_on(job, *failing)))
    assert [type(each) for each in results] == [ConfigError if rank == speaker else SaidElsewhere for rank in range(3)]
    assert str(results[speaker]) == f"wrong on {speaker}\nhint: mend it"
    others = {str(each) for rank, each in enumerate(results) if rank != speaker}
    assert others == {f"rank {speaker}: wrong on {speaker}\nhint: mend it"}


def test_who_may_hold_the_store_goes_last() -> None:
    """Where no launcher holds it, the others could not even hear why they end."""
    board, left = Board(), []

    def work(job: Job) -> None:
        try:
            gathered(job, "a thing", lambda: fails_on(job, 0))
        finally:
            left.append((job.rank, sorted(key for key in board.values if "end" in key)))

    on_ranks(3, work, board)
    assert [keys for rank, keys in left if rank == 0] == [[f"pipeloom/end/0/{rank}" for rank in range(3)]]


def test_peers_failure_is_not_agreed_on() -> None:
    """It has reached every rank by another way."""

    def work() -> None:
        raise PeerFailed("rank 1 is gone", cause=None)

    with pytest.raises(PeerFailed, match="rank 1 is gone"):
        together(Job(Board(), 0, 2), "a thing", work)


def test_who_speaks_is_not_ended_by_others() -> None:
    """A launcher ends the other ranks as soon as one has ended."""
    previous = signal.getsignal(signal.SIGTERM)
    job = Job(Board(), 0, 2)
    for key, value in {"start/0/1/1": "a thing\0[null, null]", "end/0/1": ""}.items():  # what the other rank says
        job.store.set(f"pipeloom/{key}", value)
    try:
        with pytest.raises(ConfigError, match="wrong on 0"):
            gathered(job, "a thing", lambda: fails_on(job, 0))
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_ranks_at_different_places_are_told_so() -> None:
    """One took what the other said of a checkpoint for what it says of a folder."""
    found = on_ranks(2, lambda job: job.all_gather(b"x", "the folder" if job.rank else "the checkpoint"))
    assert all(isinstance(each, ProcessError) for each in found)
    assert "rank 0 is at 'the checkpoint', rank 1 at 'the folder'" in str(found[0])


def test_alone_a_fault_is_just_raised() -> None:
    previous = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError, match="wrong"):
        together(NoJob(), "a thing", lambda: fails_on(Job(Board(), 0, 1), 0))
    assert signal.getsignal(signal.SIGTERM) == previous


def test_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(ProcessError, match=r"rank 0 of 3 waited 0\.01 s for the text from rank 1, 2"):
        Job(Board(), 0, 3, limit_s=0.01).all_gather(b"", "the text")


def test_later_attempt_remembers_and_does_not_mix_up() -> None:
    board = Board()

    def work(job: Job) -> Any:
        before = job.remembered()
        job.all_gather(f"{job.attempt}".encode(), "a test")
        job.remember(f"rank {job.rank}, attempt {job.attempt}")
        return before, job.all_gather(f"{job.attempt}".encode(), "a test")

    assert on_ranks(2, work, board) == [(None, [b"0", b"0"])] * 2
    assert on_ranks(2, work, board, attempt=1) == [("rank 0, attempt 0", [b"1", b"1"])] * 2


def test_alone_nothing_is_remembered() -> None:
    job = NoJob()
    job.remember("this")
    assert (job.remembered(), job.rank, job.num_ranks) == (None, 0, 1)


@pytest.mark.parametrize(
    ("environment", "number"),
    [({}, None), ({"WORLD_SIZE": "3"}, None), ({"RANK": "0", "WORLD_SIZE": "3"}, 3), ({"RANK": "0"}, 1)],
)
def test_number_of_processes_is_the_launchers(environment: dict[str, str], number: int | None) -> None:
    assert num_started(environment) == number


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_one_process_is_no_job(environment: dict[str, str]) -> None:
    assert isinstance(find_job(environment), NoJob)


def test_processes_that_cannot_meet_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ProcessError, match=r"WORLD_SIZE is 2, but the processes do not find each other: .*MASTER_ADDR"):
        find_job()
