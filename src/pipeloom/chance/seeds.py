"""Seeds that are tried where a model's own code fails for some draws: a loss over layers, all of which were skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pipeloom.errors import PipeloomError

Made = TypeVar("Made")


def first_that_goes(make: Callable[[int], Made], seeds: list[int]) -> Made:
    """What is made with the first of some seeds with which the model's own code does not fail."""
    for seed in seeds[:-1]:
        try:
            return make(seed)
        except PipeloomError:
            raise
        except Exception:  # with other draws it may go well
            continue
    return make(seeds[-1])
