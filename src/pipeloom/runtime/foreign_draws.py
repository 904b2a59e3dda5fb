"""Draws by Python's ``random`` or numpy's global generator inside a unit: found, and refused by name.

Their state belongs to the process. After `chance.key_draws` what a unit calls by its module is answered per thread; but
``from random import random`` is a bound C method, and other libraries hold numpy's generator itself. The obvious check,
comparing that state before and after a unit, blames a unit for what a loader thread drew meanwhile. So each unit is
watched once, exactly: Python's ``random`` by a profile function, which belongs to one thread; numpy by comparing its
state while this thread holds numpy's own lock, so that nobody else can draw.

Watching costs, so it is for the first call. A unit that starts to draw later moves the state during a step in which
nothing moved it before: then all units are watched once more.

A unit may wait for a thread that draws from numpy (a prefetcher, a pool), which waits for that lock: so the lock is let
go before the unit's thread waits for anything.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Any

from pipeloom.chance import remedy
from pipeloom.errors import DrawError
from pipeloom.runtime.draw_key import DrawKey

_PYTHON: Any = getattr(random, "_inst")  # noqa: B009  (typeshed hides it; every function of `random` is bound to it)

_COMPILER = "torch._dynamo.convert_frame"

_WAITED_FOR = (type(threading.Lock()), type(threading.RLock()), SimpleQueue)
"""Whatever waits for a thread does so in a method of one of these (or looks again and again after a `time.sleep`)."""


@dataclass(slots=True)
class _PythonWatch:
    """What was seen of Python's generator during one call; a watch that could not be kept saw nothing."""

    is_seen: bool
    num_draws: int = 0


class ForeignDraws:
    """Which units of one pipeline were watched; shared by all its ranks."""

    def __init__(self) -> None:
        self._watched: set[str] = set()
        self._has_moved = False

    def watch(self, key: DrawKey) -> AbstractContextManager[None] | None:
        """What to enter around a call of the unit; None if it was watched before.

        Raises:
            DrawError: on leaving, if the unit drew from a generator that belongs to the process.
        """
        return None if key.unit in self._watched else self._watching(key)

    @contextmanager
    def _watching(self, key: DrawKey) -> Iterator[None]:
        # Without a profile function nobody tells when the unit waits.
        numpy = _NumpyWatch(None if sys.getprofile() else _numpy_generator())
        try:
            with _python_draws(numpy.end) as python:
                yield
        finally:
            numpy.end()
        if python.num_draws or numpy.has_moved:
            raise _refusal(key, "Python's `random`" if python.num_draws else "numpy's global generator")
        if python.is_seen and numpy.is_seen:
            self._watched.add(key.unit)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Put this around a step, on the thread that starts it: may have every unit watched once more."""
        before = _states()
        try:
            yield
        finally:
            has_moved = _states() != before
            if has_moved and not self._has_moved:
                self._watched.clear()
            self._has_moved = has_moved


def _refusal(key: DrawKey, source: str) -> DrawError:
    return DrawError(
        f"unit {key.unit!r} drew from {source} (micro-batch {key.microbatch}); draws by torch are needed, because "
        "that generator is shared by all ranks: the numbers would depend on which rank comes first, and a recompute "
        "would draw others than its forward did",
        remedy(),
    )


@contextmanager
def _python_draws(end_numpy: Callable[[], None]) -> Iterator[_PythonWatch]:
    """Count calls of Python's global generator by this thread; ``end_numpy`` is called before the thread waits."""
    # A profiler of the user's goes first: it is there now, and the unit's next call comes soon.
    watch = _PythonWatch(is_seen=sys.getprofile() is None)

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            owner = getattr(function, "__self__", None)
            watch.num_draws += owner is _PYTHON and function.__name__ != "getstate"
            if isinstance(owner, _WAITED_FOR) or function is time.sleep:
                end_numpy()
        elif event == "call" and frame.f_globals.get("__name__") == _COMPILER:
            # It runs for seconds, all of it Python: the next call is soon enough.
            watch.is_seen = False
            sys.setprofile(None)
            end_numpy()

    if not watch.is_seen:
        yield watch
        return
    sys.setprofile(note)
    try:
        yield watch
    finally:
        sys.setprofile(None)


class _NumpyWatch:
    """Whether numpy's global generator moved, with other threads kept from moving it until `end`.

    Args:
        generator: the one behind ``numpy.random``; None as long as nothing imported numpy.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        # A rank that waits for another one inside a unit must not wait for this lock as well.
        self._is_held = generator is not None and generator._bit_generator.lock.acquire(blocking=False)
        self._before = _numpy_state(generator) if self._is_held else b""
        self.is_seen = generator is None or self._is_held
        self.has_moved = False

    def end(self) -> None:
        """Look, and let the others draw; what the unit draws after that is not seen in this call."""
        if self._is_held:
            self._is_held = False
            self.has_moved = _numpy_state(self._generator) != self._before
            self._generator._bit_generator.lock.release()


def _numpy_generator() -> Any:
    """The generator behind ``numpy.random``; None as long as nothing imported numpy."""
    numpy_random = sys.modules.get("numpy.random")
    return None if numpy_random is None else numpy_random.mtrand._rand


def _numpy_state(generator: Any) -> bytes:
    return b"" if generator is None else pickle.dumps(generator.get_state(legacy=False))


def _states() -> tuple[Any, bytes]:
    return _PYTHON.getstate(), _numpy_state(_numpy_generator())
