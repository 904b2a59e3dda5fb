"""How this process ends, said to the others; and its end when another has died.

A rank that ends while the others wait for it looks to them like one that is slow. So each says how it ends: in good
order, or because of an exception that nobody caught, wherever that was raised. One that is killed says nothing, but
its connections close.

A rank in long code of its user, or stuck below Python, would train on with nobody. So when another process has died, a
timer ends this one, unless its own code has got the news and is on its way out.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from pipeloom.errors import PeerFailed
from pipeloom.peers import kinds
from pipeloom.peers.cause import Cause
from pipeloom.peers.failure import Failures
from pipeloom.peers.mesh import Mesh

_UNTIL_RAISED_S = 1.2
_UNTIL_UNWOUND_S = 5.0
_UNTIL_NEWS_S = 0.3
_FLUSH_S = 0.2
_SLICE_S = 0.1


class Ending:
    """While it is open, this process's end is announced to its peers, and that of a peer ends it.

    It stands in `sys.excepthook`, in front of the one that was there, and in `atexit`; and in the main thread it takes
    SIGTERM, if nobody else does: a launcher that saw a rank die terminates the others, which should still say why.

    Args:
        mesh: started or not.
        failures: of the same mesh.
    """

    def __init__(self, mesh: Mesh, failures: Failures) -> None:
        self._mesh, self._failures = mesh, failures
        self._pid = os.getpid()
        self._is_closed = self._is_dying = self._is_timed = False
        self._next_hook, self._hook = sys.excepthook, self._uncaught
        sys.excepthook = self._hook
        self._on_sigterm = self._terminated
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        atexit.register(self.close)
        failures.on_death(self._begin_to_end)

    def close(self, error: BaseException | None = None) -> None:
        """Say good-bye, send what waits and close the mesh. A second call does nothing.

        Args:
            error: what this rank's user raised, if that is why it closes: then the others are told.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        if error is not None:
            # Last words, because others may be in a later call already, in which an earlier one's failure is no news.
            cause = self._failures.report(error)
            self._failures.say_last_words(cause)
            self._print_last(error, cause)
        elif not self._is_dying:
            self._mesh.broadcast(kinds.BYE)
        self._mesh.close()
        self._withdraw()

    def _print_last(self, error: BaseException, cause: Cause) -> None:
        """If nobody catches the exception: under its traceback the line that all ranks print."""
        below = self._next_hook

        def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
            below(kind, raised, trace)
            if raised is error and not isinstance(error, PeerFailed):
                sys.stderr.write(f"{cause.line}\n")
                sys.stderr.flush()

        self._next_hook = hook

    def _withdraw(self) -> None:
        atexit.unregister(self.close)
        if sys.excepthook is self._hook:
            sys.excepthook = self._next_hook
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == self._on_sigterm
        ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tell the others, then print as ever; the last line is the one that all ranks print."""
        if self._is_closed or self._is_dying or os.getpid() != self._pid:
            self._next_hook(kind, error, trace)
            return
        self._is_dying = True
        cause = self._failures.report(error)
        self._failures.say_last_words(cause)
        self._next_hook(kind, error, trace)
        if not isinstance(error, PeerFailed):
            sys.stderr.write(f"{cause.line}\n")
            sys.stderr.flush()

    def _terminated(self, *_: object) -> None:
        """On SIGTERM: raise why, if another rank has failed; else end as if there were no handler."""
        until = time.monotonic() + (0.0 if self._is_closed or os.getpid() != self._pid else _UNTIL_NEWS_S)
        while self._failures.cause is None and time.monotonic() < until:  # no lock: any may be held below
            time.sleep(0.01)
        raised_at_s = self._failures.raised_at_s
        if raised_at_s is not None and time.monotonic() < raised_at_s + _UNTIL_UNWOUND_S:
            _aside(_exit_late)  # it is on its way out already
            return
        self._failures.check()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    def _begin_to_end(self) -> None:
        if not self._is_timed:
            self._is_timed = True
            _aside(self._end)

    def _end(self) -> None:
        """End this process, if it has not done so by itself."""
        _pause(_UNTIL_RAISED_S)
        raised_at_s = self._failures.raised_at_s
        if raised_at_s is not None:
            _pause(raised_at_s + _UNTIL_UNWOUND_S - time.monotonic())
        if self._is_closed and not self._is_dying:
            return
        # A cause that was raised here may be one that all survived, and the death another.
        cause = (raised_at_s is None and self._failures.cause) or self._failures.death
        if cause:
            self._failures.say_last_words(cause)
            _flush()
            _aside(lambda: _say(f"\n{cause}\n")).join(_FLUSH_S)  # nobody may read it any more
            os._exit(1)


def _say(text: str) -> None:
    os.write(2, text.encode())


def _exit_late() -> None:
    _pause(_UNTIL_UNWOUND_S)
    os._exit(1)


def _aside(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def _pause(wait_s: float) -> None:
    """Sleep, in slices: a process that is stopped meanwhile gets its time afterwards."""
    for _ in range(round(wait_s / _SLICE_S)):
        time.sleep(_SLICE_S)


def _flush() -> None:
    """Write out what was printed, unless the stuck thread holds the lock of the file."""
    _aside(_flush_both).join(_FLUSH_S)


def _flush_both() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
