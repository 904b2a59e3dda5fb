"""Draws by Python's ``random`` or numpy's global generator in the parents' code: found in the dry run, and refused.

Every stage runs that code, and those generators belong to the process: each stage would mask other time steps, or skip
other layers, and nobody would say so. After `chance.key_draws` what is called by its module is answered. A dry run that
moved the process's own generators is made once more, watched call by call.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, Protocol

from pipeloom.chance import remedy
from pipeloom.errors import DrawError
from pipeloom.recording.refusals import is_of_the_user, line_at

_PYTHON: Any = getattr(random, "_inst")  # noqa: B009  (typeshed hides it; every function of `random` is bound to it)
_DRAWING = frozenset({"random", "getrandbits", "seed", "setstate"})
_is_of_the_user = cache(is_of_the_user)


class ProcessDraws:
    """Whether the state of those generators moved, but for while somebody else's code ran.

    Attributes:
        has_moved: so far.
    """

    def __init__(self) -> None:
        self.has_moved = False
        self._last = _states()

    def look(self) -> None:
        """Compare with the last look."""
        self.has_moved |= self._last != _states()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Put this around a unit: its draws are another matter."""
        self.look()
        try:
            yield
        finally:
            self._last = _states()


class Run(Protocol):
    """A dry run."""

    is_inside: bool

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model."""


def refuse_process_draws(again: Run, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Name the line that draws.

    Args:
        again: a dry run like the one that drew.
        inputs: of that one.

    Raises:
        DrawError: it drew. Where it does not, another thread did the first time.
    """
    seen: list[str] = []
    last = [_numpy_state()]

    def note(frame: FrameType, event: str, function: Any) -> None:
        has_drawn = (
            event == "c_call" and getattr(function, "__self__", None) is _PYTHON and function.__name__ in _DRAWING
        )
        if not has_drawn and _is_of_the_user(frame.f_code.co_filename):  # numpy's functions are no events
            now = _numpy_state()
            has_drawn, last[0] = now != last[0], now
        if has_drawn and not again.is_inside:
            # What a call finds was drawn by its caller.
            seen.append(line_at(frame.f_back if event == "call" else frame))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        again.run(*inputs)
    finally:
        sys.setprofile(before)
    if seen:
        raise DrawError(
            f"the code around the model's units draws from Python's `random` or numpy's global generator: {seen[0]}; "
            "every stage runs that code, and each would draw other numbers",
            f"{remedy()}; or draw before the step and pass what was drawn to the model; or switch it off",
        )


def _states() -> tuple[Any, Any]:
    return _PYTHON.getstate(), _numpy_state()


def _numpy_state() -> Any:
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    state = numpy_random.mtrand._rand.get_state(legacy=False)
    return state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"]
