"""Threads that outlive steps: the first error wins, all others end, and nobody hangs."""

import gc
import threading
import weakref
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.runtime import threads
from pipeloom.runtime.threads import RankThreads
from pipeloom.runtime.transport import Aborted

LIMIT_S = 30


class Log:
    """Records what `RankThreads` calls, in order."""

    def __init__(self):
        self.calls = []
        self.stopped = threading.Event()

    def stop(self):
        self.calls.append("stop")
        self.stopped.set()

    def undo(self):
        self.calls.append("undo")

    def undo_late(self, ranks):
        self.calls.append(("undo late", *sorted(ranks)))

    def run(self, ranks, *tasks):
        ranks.run(tasks, stop=self.stop, undo=self.undo, undo_late=self.undo_late)


@pytest.fixture
def ranks():
    made = RankThreads(2)
    yield made
    made.close()


@given(st.integers(1, 5), st.integers(1, 3))
def test_every_rank_runs_once_on_its_own_thread(num_ranks, num_rounds):
    ranks, log, seen = RankThreads(num_ranks), Log(), []
    tasks = [lambda rank=rank: seen.append((rank, threading.current_thread().name)) for rank in range(num_ranks)]
    for _ in range(num_rounds):
        log.run(ranks, *tasks)
    ranks.close()
    assert sorted(seen) == sorted([(rank, f"pipeloom-rank-{rank}") for rank in range(num_ranks)] * num_rounds)
    assert log.calls == []


def raises(error):
    def task():
        raise error

    return task


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, StopIteration])
def test_error_is_raised_as_it_is(ranks, kind):
    log, error = Log(), kind("mine")
    with pytest.raises(kind, match="mine") as caught:
        log.run(ranks, raises(error), log.stopped.wait)
    assert caught.value is error
    assert log.calls == ["stop", "undo"]
    assert not hasattr(error, "__notes__")


def test_first_error_wins(ranks):
    log = Log()

    def second():
        log.stopped.wait(LIMIT_S)
        raise ValueError("later")

    with pytest.raises(KeyError, match="first"):
        log.run(ranks, raises(KeyError("first")), second)
    assert log.calls == ["stop", "undo"]


def test_rank_that_was_told_to_stop_is_no_error(ranks):
    log = Log()
    log.run(ranks, raises(Aborted()), lambda: None)
    assert log.calls == []
    with pytest.raises(ValueError, match="real"):
        log.run(ranks, raises(ValueError("real")), raises(Aborted()))


def test_threads_serve_after_an_error(ranks):
    log, seen = Log(), []
    for round_ in range(3):
        with pytest.raises(ValueError, match="again"):
            log.run(ranks, raises(ValueError("again")), lambda: None)
        log.run(ranks, lambda round_=round_: seen.append(round_), lambda: None)
    assert seen == [0, 1, 2]
    assert log.calls == ["stop", "undo"] * 3


def test_late_rank_is_waited_for_before_the_next_tasks(ranks, monkeypatch):
    monkeypatch.setattr(threads, "GRACE_S", 0.01)
    log, may_end, order = Log(), threading.Event(), []

    def late():
        may_end.wait(LIMIT_S)
        order.append("late")

    with pytest.raises(ValueError, match="early") as caught:
        log.run(ranks, raises(ValueError("early")), late)
    assert order == []
    assert caught.value.__notes__ == ["ranks [1] were still busy; the pipeline waits for them before its next step"]
    threading.Timer(0.01, may_end.set).start()
    log.run(ranks, lambda: None, lambda: order.append("next"))
    assert order == ["late", "next"]
    assert log.calls == ["stop", "undo", ("undo late", 1)]


def test_error_of_a_late_rank_is_dropped(ranks, monkeypatch):
    """The caller has heard of the first one already."""
    monkeypatch.setattr(threads, "GRACE_S", 0.01)
    log, may_end = Log(), threading.Event()

    def late():
        may_end.wait(LIMIT_S)
        raise KeyError("too late")

    with pytest.raises(ValueError, match="early"):
        log.run(ranks, raises(ValueError("early")), late)
    may_end.set()
    ranks.wait_for_late_ranks()
    ranks.wait_for_late_ranks()
    assert log.calls == ["stop", "undo", ("undo late", 1)]


@pytest.mark.timeout(LIMIT_S)
def test_interrupt_may_swallow_a_report(ranks, monkeypatch):
    """A signal's handler may run after a queue's `get` has taken a value and before anything is done with it."""
    log, swallowed = Log(), []

    class Swallowing(SimpleQueue):
        def get(self, *args, **options):
            swallowed.append(super().get(*args, **options))
            if len(swallowed) == 1:
                raise KeyboardInterrupt
            return swallowed[-1]

    log.run(ranks, int, int)
    monkeypatch.setattr(threads, "SimpleQueue", Swallowing)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        log.run(ranks, int, int)
    log.run(ranks, int, int)
    assert len(swallowed) > 1
    assert log.calls == ["stop", "undo"]


def test_grace_leaves_time_to_report():
    assert 0 < threads.GRACE_S < 2


def test_error_does_not_keep_what_it_came_through(ranks):
    class Big:
        pass

    references = []

    def task():
        big = Big()
        references.append(weakref.ref(big))
        raise ValueError("big")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="big") as caught:
            Log().run(ranks, task, lambda: None)
        assert references[0]() is not None
        del caught
        assert references[0]() is None
    finally:
        gc.enable()


def test_idle_threads_keep_nothing(ranks):
    class Big:
        def __call__(self):
            pass

    big = Big()
    reference = weakref.ref(big)
    Log().run(ranks, big, lambda: None)
    del big
    assert reference() is None


def test_close_ends_the_threads_and_may_be_repeated():
    others = set(threading.enumerate())  # of pipelines that earlier tests have not closed
    ranks = RankThreads(2)
    Log().run(ranks, lambda: None, lambda: None)
    mine = [each for each in threading.enumerate() if each.name.startswith("pipeloom-rank-") and each not in others]
    assert len(mine) == 2
    ranks.close()
    ranks.close()
    assert not any(thread.is_alive() for thread in mine)


def test_threads_are_daemons(ranks):
    """They never keep a process alive."""
    seen = []
    Log().run(ranks, lambda: seen.append(threading.current_thread().daemon), lambda: None)
    assert seen == [True]
