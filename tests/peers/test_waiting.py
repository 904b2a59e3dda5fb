import time
from queue import Empty, SimpleQueue

import pytest

from pipeloom.peers import Overdue, Patience


class Queue:
    """A queue whose waits take as long as they are told to, on a clock of the test."""

    def __init__(self, clock, waits):
        self.clock, self.waits, self.asked = clock, iter(waits), []

    def get(self, timeout):
        self.asked.append(timeout)
        took = next(self.waits)
        if took is None:
            return "came"
        self.clock[0] += took
        raise Empty


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_what_is_there_is_taken_at_once():
    queue = SimpleQueue()
    queue.put("here")
    assert Patience(0.0).take(queue) == "here"


def test_it_is_over_after_the_limit(clock):
    queue = Queue(clock, [0.5, 0.5, 0.25, 0.0])
    with pytest.raises(Overdue, match=r"^$"):
        Patience(1.25).take(queue)
    assert queue.asked == [0.5, 0.5, 0.25, 0.0]


def test_a_stop_of_the_process_does_not_count(clock):
    queue = Queue(clock, [0.5, 1000.0, 0.5, None])
    assert Patience(1.75).take(queue) == "came"
    assert queue.asked == [0.5, 0.5, 0.5, 0.25]


def test_several_waits_share_a_limit(clock):
    queue = Queue(clock, [0.5, 0.25, None, 0.25, 0.0])
    patience = Patience(1.0)
    patience.take(queue)
    with pytest.raises(Overdue, match=r"^$"):
        patience.take(queue)
    assert queue.asked == [0.5, 0.5, 0.25, 0.25, 0.0]
