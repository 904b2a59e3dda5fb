"""What a dry run is given where nothing is to be noted or drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from pipeloom.chance import AROUND, Generators, entered

Draws = Callable[[str, int], AbstractContextManager[Any]]
"""``draws(name, call)``: put it around what draws random numbers."""


def no_draws(name: str, call: int) -> AbstractContextManager[Any]:
    """Where random numbers don't matter."""
    del name, call
    return nullcontext()


@contextmanager
def drawn_around(draws: Draws, seed: int) -> Iterator[Generators]:
    """Put this around a dry run: what its code draws by Python's ``random`` and numpy comes from these generators."""
    with entered(Generators(seed)) as plain, draws(AROUND, 0) as keyed:
        yield keyed or plain
