"""Two actions that a rank runs as one, by a function of the user's (DualPipe's F&B).

What makes them overlap is not for us to know: two streams of a GPU, a thread, or a model whose forward and backward are
written as one. The function gets two calls and runs each once, in any order and any thread, at the same time if it
can; values have come before, and leave after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipeloom.errors import RuntimeStateError
from pipeloom.ir import Action, Kind
from pipeloom.runtime.ambient import Reentry, carried

Half = Callable[[], None]
OverlapFn = Callable[[Half, Half], object]
"""``overlap(forward, backward)``: two calls without arguments, the one of an F first; each has to be called once."""


def run_pair(overlap: OverlapFn, first: tuple[Action, Half], second: tuple[Action, Half]) -> None:
    """Run both halves of a pair by the user's function.

    Raises:
        RuntimeStateError: it did not call each half once, or came back while one still ran.
        BaseException: what a half raised, also where the function kept it to itself; or what the function raised.
    """
    reentry = carried()
    halves = [_Half(action, run, reentry) for action, run in (first, second)]
    # Stable: two of the same kind come in the order of the program.
    forward, backward = sorted(halves, key=lambda half: half.action.kind is not Kind.FORWARD)
    try:
        overlap(forward, backward)
    except BaseException as error:
        if not any(half.error is error for half in halves):
            error.add_note(f"raised by the overlap function around {first[0]} and {second[0]}")
        raise
    for half in halves:
        half.check()


class _Half:
    """One half; to be called once."""

    def __init__(self, action: Action, run: Half, reentry: Reentry) -> None:
        self.action = action
        self.error: BaseException | None = None
        self._run, self._reentry = run, reentry
        self._thread = threading.get_ident()
        self._is_begun = self._is_over = False

    def __call__(self) -> None:
        if self._is_begun:
            raise self._wrong("called it twice")
        self._is_begun = True
        try:
            if threading.get_ident() == self._thread:
                self._run()
            else:
                with self._reentry():
                    self._run()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._is_over = True

    def check(self) -> None:
        """Raise if it failed, was not called, or has not ended."""
        if self.error is not None:
            raise self.error
        if not self._is_over:
            raise self._wrong("came back while it still ran" if self._is_begun else "did not call it")

    def _wrong(self, what: str) -> RuntimeStateError:
        return RuntimeStateError(
            f"the overlap function got a call that runs {self.action}, and {what}; each half of a pair runs once",
            "call both, forward() and backward(), once each, and wait for what runs in another thread",
        )
