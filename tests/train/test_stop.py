"""A signal is noted, told to all ranks, and acted on by all of them together; the second one ends at once."""

import signal
import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

import pytest

from pipeloom.train.stop import Stop


@dataclass
class Pair:
    """One of two ranks that hear each other through queues."""

    rank: int
    inbox: SimpleQueue = field(default_factory=SimpleQueue)
    outbox: SimpleQueue = field(default_factory=SimpleQueue)
    num_ranks: int = 2

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        self.outbox.put(payload)
        both = [payload, self.inbox.get(timeout=60)]
        return both if self.rank == 0 else both[::-1]


def two_stops() -> tuple[Stop, Stop]:
    first = Pair(0)
    return Stop(first), Stop(Pair(1, first.outbox, first.inbox))


def agree(one: Stop, other: Stop) -> None:
    thread = threading.Thread(target=other.agree)
    thread.start()
    one.agree()
    thread.join()


def test_alone_a_signal_counts_at_once() -> None:
    stop = Stop()
    assert stop.signal == 0
    stop.note(signal.SIGTERM)
    assert stop.signal == signal.SIGTERM


@pytest.mark.parametrize("receiver", [0, 1])
def test_ranks_act_on_it_when_all_know(receiver: int) -> None:
    stops = two_stops()
    agree(*stops)
    stops[receiver].note(signal.SIGTERM)
    assert [stop.signal for stop in stops] == [0, 0]
    agree(*stops)
    assert [stop.signal for stop in stops] == [signal.SIGTERM] * 2


def test_ranks_agree_on_one_of_two_signals() -> None:
    stops = two_stops()
    stops[0].note(signal.SIGINT)
    stops[1].note(signal.SIGTERM)
    agree(*stops)
    assert [stop.signal for stop in stops] == [signal.SIGINT] * 2


def test_memory_is_that_of_the_largest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([300, 500])
    monkeypatch.setattr("pipeloom.train.stop.peak_memory_bytes", lambda: next(sizes))
    stops = two_stops()
    agree(*stops)
    assert [stop.memory_bytes for stop in stops] == [500, 500]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_handlers_are_put_back(number: signal.Signals) -> None:
    before, stop = signal.getsignal(number), Stop()
    with stop.listening(number):
        signal.raise_signal(number)
    assert stop.signal == number
    assert signal.getsignal(number) is before


def test_second_ctrl_c_interrupts_at_once() -> None:
    stop = Stop()
    with stop.listening(signal.SIGINT):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            signal.raise_signal(signal.SIGINT)
    assert stop.signal == signal.SIGINT


def test_second_sigterm_is_the_systems_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, raised = Stop(), []
    with stop.listening(signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(signal, "raise_signal", lambda number: raised.append((number, signal.getsignal(number))))
        stop._handle(signal.SIGTERM, None)
    assert raised == [(signal.SIGTERM, signal.SIG_DFL)]
    assert stop.signal == signal.SIGINT


def test_end_of_the_launcher_may_be_said_twice() -> None:
    stop = Stop()
    with stop.listening(signal.SIGHUP):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    assert stop.signal == signal.SIGHUP


def test_other_threads_get_no_signals() -> None:
    seen: list[object] = []

    def note() -> None:
        with Stop().listening(signal.SIGINT):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=note)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
