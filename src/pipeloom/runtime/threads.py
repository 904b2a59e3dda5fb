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
        self._inboxes: list[SimpleQueue[tuple[Task, _Round] | None]] = []
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
        current = _Round()
        try:
            current.hand_out(tasks, self._inboxes)
            error = current.first_error()
        except BaseException:
            stop()
            self._end(current, undo, undo_late)
            raise
        if error is not None:
            stop()
            try:
                self._end(current, undo, undo_late)
                if self._late is not None:
                    busy = sorted(self._late.ranks)
                    error.add_note(f"ranks {busy} were still busy; the pipeline waits for them before its next step")
                raise error
            finally:
                del error  # it refers to this frame, and through it to all activations of the step

    def wait_for_late_ranks(self) -> None:
        """Wait for ranks that were still busy when an earlier step failed, then undo what they did since."""
        if self._late is None:
            return
        late = self._late
        late.current.wait(math.inf)
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
            inbox: SimpleQueue[tuple[Task, _Round] | None] = SimpleQueue()
            thread = threading.Thread(target=_work, args=(rank, inbox), name=f"pipeloom-rank-{rank}", daemon=True)
            thread.start()
            self._threads.append(thread)
            self._inboxes.append(inbox)

    def wait_at_exit(self) -> None:
        """Give ranks that are still busy some time to come out of torch before the interpreter goes away."""
        if self._late is not None:
            self._late.current.wait(EXIT_GRACE_S)

    def _end(self, current: _Round, undo: Task, undo_late: UndoLate) -> None:
        """Wait a little for the ranks that still run; remember those that go on."""
        try:
            current.wait(GRACE_S)
        finally:  # the caller may be interrupted again
            if running := current.running():
                self._late = _Late(current, running, undo_late)
                _LATE.add(self)
            undo()


class _Round:
    """One task for each rank: which were handed out, and how those ended that have.

    Ctrl-C may strike the caller between any two steps of Python, so also when a `get` has taken a value and nobody has
    it yet. What is known therefore stands in containers that only grow, each in one step; the queue just wakes.
    """

    def __init__(self) -> None:
        self._handed_out: list[None] = []
        self._outcomes: dict[int, BaseException | None] = {}
        self._bell: SimpleQueue[None] = SimpleQueue()

    def hand_out(self, tasks: Sequence[Task], inboxes: Sequence[SimpleQueue[tuple[Task, _Round] | None]]) -> None:
        """Put ``tasks[rank]`` into ``inboxes[rank]``, and count it in the same step: `extend` over C is one."""
        orders = [(task, self) for task in tasks]
        self._handed_out.extend(map(SimpleQueue.put, inboxes, orders))

    def report(self, rank: int, error: BaseException | None) -> None:
        """Called by a rank when its task has ended."""
        self._outcomes[rank] = error
        self._bell.put(None)

    def running(self) -> frozenset[int]:
        """The ranks whose tasks were handed out and have not ended."""
        return frozenset(range(len(self._handed_out))).difference(tuple(self._outcomes))

    def first_error(self) -> BaseException | None:
        """Wait for all ranks, or until one fails; forget what it raised, and return it."""
        while True:
            is_over = not self.running()
            for rank, error in tuple(self._outcomes.items()):
                if error is not None:
                    self._outcomes[rank] = None  # it refers to the caller's frame, and that to this
                    return error
            if is_over:
                return None
            self._bell.get()

    def wait(self, limit_s: float) -> None:
        """Wait for all ranks, at most for a time."""
        deadline_s = time.monotonic() + limit_s
        while self.running() and (left_s := deadline_s - time.monotonic()) > 0:
            with suppress(Empty):
                self._bell.get(timeout=min(left_s, threading.TIMEOUT_MAX))


@dataclass(frozen=True, slots=True)
class _Late:
    """Ranks that were still busy when their step had failed."""

    current: _Round
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


def _work(rank: int, inbox: SimpleQueue[tuple[Task, _Round] | None]) -> None:
    while (order := inbox.get()) is not None:
        task, current = order
        current.report(rank, _outcome(task))
        del order, task, current


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
