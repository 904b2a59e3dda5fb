"""Draws by Python's ``random`` or numpy that change nothing: ``random.random() < self.layerdrop`` with a rate of 0.

Whether that is so is tried: the code runs with the lowest, a middle and the highest number that `random` can give, and
each function of torch and each unit must be called with the same. Of numpy these are functions that give uniform
numbers; others move its generator, and a draw that moves one is not tried.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeloom.batch.trees import flatten
from pipeloom.recording.dry_run import DryRun
from pipeloom.standins.clone import Call
from pipeloom.standins.placeholder import Placeholder

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_EXTREMES = (0.0, 0.5, 1.0 - 2.0**-53)
_MOST_DRAWS = 10_000
"""Of one run. `random.gauss` and others draw until they like what they get, which a number that stays never is."""
_NUMPY = ("rand", "random", "random_sample", "ranf", "sample", "uniform")
_PLAIN = (int, float, complex, str, bytes, type(None))


class NotingRun(DryRun):
    """A dry run that notes what functions and units are called with.

    Attributes:
        notes: per call, its arguments: numbers of real tensors, values of placeholders, plain Python values.
    """

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model."""
        self.notes: list[Any] = []
        return super().run(args, kwargs)

    def _glue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note(func, args, kwargs)
        return super()._glue(func, args, kwargs)

    def _unit(self, name: str, run: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note(name, args, kwargs)
        return super()._unit(name, run, args, kwargs)

    def _note_results(self, out: Any) -> None:
        super()._note_results(out)
        self._note("returned", (out,), {})

    def _note(self, what: Any, args: Any, kwargs: Any) -> None:
        self.notes.append((what, [_outline(leaf) for leaf in flatten((args, kwargs))[0]]))


def are_ignored(make: Callable[[], NotingRun], inputs: Inputs) -> bool:
    """Whether the model's code does the same whatever `random` gives it.

    Args:
        make: makes a dry run.
        inputs: for it.
    """
    seen = []
    for number in _EXTREMES:
        try:
            with pinned(number):
                run = make()
                recording = run.run(*inputs)
        except Exception:  # with such a number its code fails, or cannot be cut: what is drawn does matter
            return False
        if run.process_draws.has_moved:  # by other functions of numpy, or such as were imported out of `random`
            return False
        seen.append((run.notes, [op.inputs for op in recording.ops], recording.results))
    return all(each == seen[0] for each in seen)


@contextmanager
def pinned(number: float) -> Iterator[None]:
    """Let `random`'s functions use a number in [0, 1) in the place of each that they would draw, on this thread."""
    shared: Any = random._inst
    here, num_draws, plain, below = threading.get_ident(), [0], shared.random, shared._randbelow

    def count() -> bool:
        num_draws[0] += 1
        if num_draws[0] > _MOST_DRAWS:
            raise RuntimeError("drawn again and again")
        return threading.get_ident() == here

    def pinned_random() -> float:
        return number if count() else plain()

    def pinned_below(limit: int) -> int:
        return int(number * limit) if count() else below(limit)

    was = random.random
    shared.random = random.random = pinned_random
    shared._randbelow = pinned_below
    try:
        with _pinned_numpy(number, count):
            yield
    finally:
        random.random = was
        del shared.random, shared._randbelow


@contextmanager
def _pinned_numpy(number: float, count: Callable[[], bool]) -> Iterator[None]:
    """The same for functions of ``numpy.random`` that give uniform numbers."""
    where: Any = sys.modules.get("numpy.random")
    plain = {} if where is None else {name: getattr(where, name) for name in _NUMPY}

    def full(size: Any) -> Any:
        return number if size is None else sys.modules["numpy"].full(size, number)

    def uniform(low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return low + (high - low) * full(size)

    made: dict[str, Any] = dict.fromkeys(_NUMPY, lambda size=None: full(size))
    made |= {"rand": lambda *shape: full(shape or None), "uniform": uniform}
    try:
        for name, function in plain.items():
            setattr(where, name, partial(_either, count, made[name], function))
        yield
    finally:
        for name, function in plain.items():
            setattr(where, name, function)


def _either(count: Callable[[], bool], pinned: Any, plain: Any, /, *args: Any, **kwargs: Any) -> Any:
    return (pinned if count() else plain)(*args, **kwargs)


def _outline(leaf: Any) -> Any:
    if isinstance(leaf, Placeholder):
        return "value", tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
        numbers = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
        return "tensor", tuple(leaf.shape), leaf.dtype, numbers.numpy().tobytes()
    return (type(leaf).__name__, repr(leaf)) if isinstance(leaf, _PLAIN) else type(leaf).__name__
