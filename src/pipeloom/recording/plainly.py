"""What a dry run is given where nothing is to be noted or drawn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Draws = Callable[[str, int], AbstractContextManager[Any]]
"""``draws(name, call)``: put it around what draws random numbers."""


def no_draws(name: str, call: int) -> AbstractContextManager[Any]:
    """Where random numbers don't matter."""
    del name, call
    return nullcontext()


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Glue of a run that notes modules only."""
    return func(*args, **kwargs)
