"""Generators of their own for what Python's ``random`` and ``numpy.random`` are asked while a model's code runs.

Those modules have one generator for the whole process. Ranks are threads, and every stage runs the code around the
units: from one generator they would mask other time steps on each stage, or skip other layers, and a recompute would
draw others than its forward did. So such draws are found, and refused by name (`recording.process_draws`,
`runtime.foreign_draws`), unless a user asks for stand-ins for the functions of both modules (`key_draws`): those look
for generators of the thread that calls (`entered`), or of the unit that it runs (`watch_units`), and else do what they
did.

A function that was imported out of its module before (``from random import random``) is not reached so, nor is what
other libraries draw from numpy's generator itself: refused as before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

from pipeloom.errors import DrawError

AROUND = "(the code around the units)"
"""The name, where a unit's stands, of what a model's own code draws for all stages alike."""

_NUMPY = "numpy.random"
_PLAIN_NUMPY = {"seed": "seed", "sample": "random_sample", "ranf": "random_sample"}
"""What numpy has as functions rather than as methods of its generator, and the method that does the same."""
_GET, _SET = {"random": "getstate", _NUMPY: "get_state"}, {"random": "setstate", _NUMPY: "set_state"}
_SETTING = frozenset({"seed", "setstate", "set_state"})

_replaced: list[tuple[Any, str, Any]] = []
_here = threading.local()
_units: list[Callable[[], Generators | None]] = []


class Generators:
    """Python's and numpy's generator of one call, made when the first draw asks.

    Args:
        seed: of both.
        backward_of: what is back-propagated, where this is a backward: its draws are refused, unless a recomputation
            puts back the state of its forward.

    Attributes:
        is_used: whether anything was asked of them.
    """

    __slots__ = ("_backward_of", "_made", "_seed", "is_used")

    def __init__(self, seed: int, backward_of: str | None = None) -> None:
        self._seed = seed
        self._backward_of = backward_of
        self._made: dict[str, Any] = {}
        self.is_used = False

    def method(self, module: str, name: str) -> Any:
        """The method that answers for a function of ``random`` or ``numpy.random``.

        Raises:
            DrawError: this is a backward, and draws.
        """
        self.is_used = True
        if self._backward_of is not None and name not in _SETTING:
            raise DrawError(
                f"the {self._backward_of} drew from Python's `random` or numpy's global generator, outside of a "
                "recomputation that puts back the random state of its forward; a recomputed forward has to draw the "
                "numbers of the first one, whether it sets a seed or not",
                "use torch.utils.checkpoint with preserve_rng_state=True, or leave it to the pipeline (recompute=True, "
                "or recompute= with the modules' names).",
            )
        found = getattr(self._generator(module), name)
        return functools.partial(_seeded, module, found) if name == "seed" else found

    def state(self) -> Any:
        """What `restore` needs."""
        made = {module: getattr(each, _GET[module])() for module, each in self._made.items()}
        return self._seed, self._backward_of, made

    def restore(self, state: Any) -> None:
        """Draw from here on what was drawn after `state`, of these generators or of others."""
        self._seed, self._backward_of, made = state
        self._made = {}
        for module, each in made.items():
            getattr(self._generator(module), _SET[module])(each)

    def _generator(self, module: str) -> Any:
        if module not in self._made:
            self._made[module] = (
                random.Random(self._seed)
                if module == "random"
                else sys.modules[_NUMPY].RandomState(self._seed & 0xFFFF_FFFF)
            )
        return self._made[module]


def _seeded(module: str, seed: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if (*args, *kwargs.values(), None)[0] is None:
        raise DrawError(
            f"{module}.seed() was called without a number in a model's code; a seed that is a function of step and "
            "micro-batch is needed, because a recompute, and every other stage, has to draw the same numbers",
            "remove the call, or give it a number.",
        )
    seed(*args, **kwargs)


class entered:  # noqa: N801  (a context manager; a class, because every forward of every stage enters one)
    """Answer this thread's draws outside of units from ``generators``; contexts nest."""

    __slots__ = ("_generators", "_outer")

    def __init__(self, generators: Generators) -> None:
        self._generators = generators
        self._outer: Generators | None = None

    def __enter__(self) -> Generators:
        self._outer = getattr(_here, "generators", None)
        _here.generators = self._generators
        return self._generators

    def __exit__(self, *_: object) -> None:
        _here.generators = self._outer


def watch_units(generators: Callable[[], Generators | None]) -> None:
    """Let draws inside a unit be answered by what this gives there; None outside of units."""
    _units.append(generators)


def key_draws(enable: bool = True) -> None:
    """Let what a model's code draws by ``random`` and ``numpy.random`` be a function of seed, step, micro-batch and
    place, as its draws by torch are; call it once, before the pipeline is made, in every process.

    Pipelines refuse such draws otherwise. wav2vec 2.0 and HuBERT mask by numpy in training, BigBird chooses its blocks
    so. The functions of both modules are replaced for the whole program; outside of a model they do what they did.

    Args:
        enable: False puts the functions back.
    """
    if not enable:
        while _replaced:
            setattr(*_replaced.pop())
    elif not _replaced:
        _replace(random, getattr(random, "_inst"), {})  # noqa: B009  (typeshed hides it)
        with contextlib.suppress(ImportError):
            numpy_random: Any = importlib.import_module(_NUMPY)
            _replace(numpy_random, numpy_random.mtrand._rand, _PLAIN_NUMPY)


def are_keyed() -> bool:
    """Whether `key_draws` is in force."""
    return bool(_replaced)


def _replace(module: Any, shared: Any, others: dict[str, str]) -> None:
    for name in dir(module):
        plain = getattr(module, name)
        if getattr(plain, "__self__", None) is shared or name in others:
            _replaced.append((module, name, plain))
            setattr(module, name, _standing_in(plain, module.__name__, name, others.get(name, plain.__name__)))


def _standing_in(plain: Any, module: str, name: str, method: str) -> Any:
    def draw(*args: Any, **kwargs: Any) -> Any:
        own = _current()
        return plain(*args, **kwargs) if own is None else own.method(module, method)(*args, **kwargs)

    functools.update_wrapper(draw, plain)
    draw.__module__, draw.__name__, draw.__qualname__ = module, name, name  # where pickle looks for it
    return draw


def _current() -> Generators | None:
    for generators in _units:
        found = generators()
        if found is not None:
            return found
    return getattr(_here, "generators", None)
