"""Draws by Python's ``random`` or numpy's global generator inside a unit: found, and refused by name.

Nothing can redirect them per thread: their state belongs to the process, and ``from random import random`` is a bound
C method. The obvious check, comparing that state before and after a unit, blames a unit for what a loader thread drew
meanwhile. So each unit is watched once, exactly: Python's ``random`` by a profile function, which belongs to one
thread; numpy by comparing its state while this thread holds numpy's own lock, so that nobody else can draw.

Watching costs, so it is for the first call. A unit that starts to draw later moves the state during a step in which
nothing moved it before: then all units are watched once more.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from pipeloom.errors import DrawError

if TYPE_CHECKING:
    from pipeloom.runtime.draws import DrawKey

_PYTHON: Any = getattr(random, "_inst")  # noqa: B009  (typeshed hides it; every function of `random` is bound to it)

_COMPILER = "torch._dynamo.convert_frame"


@dataclass(slots=True)
class _Watch:
    """What was seen of one generator during one call; a watch that could not be kept saw nothing."""

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
        with _python_draws() as python, _numpy_draws() as numpy:
            yield
        if python.num_draws or numpy.num_draws:
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
        "draw with torch instead, for example torch.rand(()).item() < p.",
    )


@contextmanager
def _python_draws() -> Iterator[_Watch]:
    """Count calls of Python's global generator by this thread."""
    # A profiler of the user's goes first: it is there now, and the unit's next call comes soon.
    watch = _Watch(is_seen=sys.getprofile() is None)

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            is_draw = getattr(function, "__self__", None) is _PYTHON and function.__name__ != "getstate"
            watch.num_draws += is_draw
        elif event == "call" and frame.f_globals.get("__name__") == _COMPILER:
            # It runs for seconds, all of it Python: the next call is soon enough.
            watch.is_seen = False
            sys.setprofile(None)

    if not watch.is_seen:
        yield watch
        return
    sys.setprofile(note)
    try:
        yield watch
    finally:
        sys.setprofile(None)


@contextmanager
def _numpy_draws() -> Iterator[_Watch]:
    """Whether numpy's global generator moved, with other threads kept from moving it."""
    generator = _numpy_generator()
    if generator is None:
        yield _Watch(is_seen=True)
        return
    lock = generator._bit_generator.lock
    # A rank that waits for another one inside a unit must not wait for this lock as well.
    watch = _Watch(is_seen=lock.acquire(blocking=False))
    if not watch.is_seen:
        yield watch
        return
    try:
        before = _numpy_state(generator)
        yield watch
        watch.num_draws = int(_numpy_state(generator) != before)
    finally:
        lock.release()


def _numpy_generator() -> Any:
    """The generator behind ``numpy.random``; None as long as nothing imported numpy."""
    numpy_random = sys.modules.get("numpy.random")
    return None if numpy_random is None else numpy_random.mtrand._rand


def _numpy_state(generator: Any) -> bytes:
    return b"" if generator is None else pickle.dumps(generator.get_state(legacy=False))


def _states() -> tuple[Any, bytes]:
    return random.getstate(), _numpy_state(_numpy_generator())
