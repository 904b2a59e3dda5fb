"""One thread per rank, kept from step to step.

A thread per step would build torch's pool of intra-op threads anew each time. Idle threads hold no reference to
the pipeline, so it can be collected; they are daemons, so they never keep a process alive.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from pipeloom.runtime.transport.base import Aborted

Task = Callable[[], None]
UndoLate = Callable[[Collection[int]], None]
GRACE_S = 1.5
"""How long the other ranks may take to end after one failed, before the caller hears of it all the same."""
EXIT_GRACE_S = 10.0
"""How long they may take at the end of the process: a thread that is torn out of C++ aborts it."""


class RankThreads:
    """The threads of one pipeline.

    Args:
        num_ranks: how many tasks each `run` has.
    """

    def __init__(self, num_ranks: int) -> None:
        self._inboxes: list[SimpleQueue[tuple[Task, _Done] | None]] = []
        self._threads: list[threading.Thread] = []
        self._num_ranks = num_ranks
        self._late: _Late | None = None

    def run(self, tasks: Sequence[Task], *, stop: Task, undo: Task, undo_late: UndoLate) -> None:
        """Run one task per rank and wait for all.

        Args:
            tasks: ``tasks[rank]``.
            stop: called when a task fails, or the caller is interrupted; the other tasks should end soon.
            undo: called then, when all tasks have ended or had the time to.
            undo_late: called, before the next tasks run, with the ranks that ended only after ``undo``.

        Raises:
            BaseException: the first that a task raised, as it is; `KeyboardInterrupt` of the caller.
        """
        self.wait_for_late_ranks()
        self._start()
        done: _Done = SimpleQueue()
        running: set[int] = set()
        try:
            for rank, task in enumerate(tasks):
                self._inboxes[rank].put((task, done))
                running.add(rank)
            error = self._first_error(done, running)
        except BaseException:
            stop()
            self._end(done, running, undo, undo_late)
            raise
        if error is not None:
            stop()
            try:
                self._end(done, running, undo, undo_late)
                if running:
                    error.add_note(
                        f"ranks {sorted(running)} were still busy; the pipeline waits for them before its next step"
                    )
                raise error
            finally:
                del error  # it refers to this frame, and through it to all activations of the step

    def wait_for_late_ranks(self) -> None:
        """Wait for ranks that were still busy when an earlier step failed, then undo what they did since."""
        if self._late is None:
            return
        late = self._late
        self._wait(late.done, late.running, math.inf)
        self._late = None
        _LATE.discard(self)
        late.undo(late.ranks)

    def close(self) -> None:
        """End the threads, and wait for those that are idle.

        A thread that is still inside torch when the interpreter goes away takes the process down with it.
        """
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(GRACE_S)
                _wait_for_system_thread(thread, GRACE_S)
        self._inboxes.clear()
        self._threads.clear()

    def _start(self) -> None:
        if not all(thread.is_alive() for thread in self._threads):  # this process was forked from theirs
            self._threads.clear()
            self._inboxes.clear()
        while len(self._inboxes) < self._num_ranks:
            rank = len(self._inboxes)
            inbox: SimpleQueue[tuple[Task, _Done] | None] = SimpleQueue()
            thread = threading.Thread(target=_work, args=(rank, inbox), name=f"pipeloom-rank-{rank}", daemon=True)
            thread.start()
            self._threads.append(thread)
            self._inboxes.append(inbox)

    @staticmethod
    def _first_error(done: _Done, running: set[int]) -> BaseException | None:
        while running:
            rank, error = done.get()
            running.discard(rank)
            if error is not None:
                return error
        return None

    @staticmethod
    def _wait(done: _Done, running: set[int], limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while running and (left_s := deadline_s - time.monotonic()) > 0:
            with suppress(Empty):
                running.discard(done.get(timeout=min(left_s, threading.TIMEOUT_MAX))[0])

    def wait_at_exit(self) -> None:
        """Give ranks that are still busy some time to come out of torch before the interpreter goes away."""
        if self._late is not None:
            self._wait(self._late.done, self._late.running, EXIT_GRACE_S)

    def _end(self, done: _Done, running: set[int], undo: Task, undo_late: UndoLate) -> None:
        """Wait a little for the ranks that still run; remember those that go on."""
        try:
            self._wait(done, running, GRACE_S)
        finally:  # the caller may be interrupted again
            if running:
                self._late = _Late(done, running, frozenset(running), undo_late)
                _LATE.add(self)
            undo()


_Done = SimpleQueue[tuple[int, BaseException | None]]


@dataclass(frozen=True, slots=True)
class _Late:
    """Ranks that were still busy when their step had failed; ``running`` are those that are busy yet."""

    done: _Done
    running: set[int]
    ranks: frozenset[int]
    undo: UndoLate


def _wait_for_system_thread(thread: threading.Thread, limit_s: float) -> None:
    """Before Python 3.13 ``join`` returns when Python is done with a thread, which may not be done with torch.

    Its thread-local objects are freed after that and take the interpreter's lock; if the interpreter ends
    meanwhile, that aborts the process. Linux can be asked whether the thread still exists.
    """
    path = Path("/proc/self/task") / str(thread.native_id)
    deadline_s = time.monotonic() + limit_s
    while path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.001)


def _work(rank: int, inbox: SimpleQueue[tuple[Task, _Done] | None]) -> None:
    while (order := inbox.get()) is not None:
        task, done = order
        done.put((rank, _outcome(task)))
        del order, task, done


def _outcome(task: Task) -> BaseException | None:
    try:
        task()
    except Aborted:
        return None
    except BaseException as error:
        return error
    return None


_LATE: set[RankThreads] = set()


@atexit.register
def _wait_for_late_ranks() -> None:
    for ranks in list(_LATE):
        ranks.wait_at_exit()
