"""Every exception that Pipeloom raises on purpose.

::

    PipeloomError
    ├── ScheduleError
    │   ├── UnknownSchedule      no schedule of that name
    │   ├── UnsupportedShape     a schedule cannot be made, or run, at these counts
    │   ├── NotationError        text that is not a schedule
    │   └── InvalidSchedule      `verify` found violations
    ├── CostError                costs that do not fit the schedule
    ├── SplitError               a model that cannot be cut as asked
    │   └── UncuttableCode       what its own code does allows no such cut: names its line or module
    ├── BatchError               inputs that cannot be cut into micro-batches, or outputs that cannot be merged
    ├── LossError                a loss or target that cannot be used
    │   └── NonFiniteLoss        NaN or infinity: names the step and the micro-batch
    ├── RuntimeStateError        a pipeline used when it cannot be
    ├── DrawError                random numbers that would depend on who runs a unit
    ├── ParityError              a pipelined step that computes something else than the model: `comparison` says what
    ├── ProcessError             processes that do not find each other, or do not do the same
    │   └── SaidElsewhere        another rank has found what is wrong, and says it
    ├── PeerFailed               another process failed, was killed, stalled or ended: `cause` says which and where
    ├── ConfigError              configuration of `pipeloom train`
    ├── DataError                training text that is missing or cannot be read
    └── CheckpointError          a checkpoint that is damaged or belongs to another model

What a user's own module raises is never wrapped: it reaches the caller as it is, with a note
(PEP 678) that names rank, stage, micro-batch and action.

A message says what was given, what was needed and why; ``hint`` says what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class PipeloomError(Exception):
    """Base of the tree.

    Args:
        message: what was given, what was needed, why.
        hint: what to do, one sentence; printed on a line of its own.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")
        self.message = message
        self.hint = hint


class ScheduleError(PipeloomError, ValueError):
    """A schedule that cannot be named, made, read or run."""


class UnknownSchedule(ScheduleError):
    """No schedule of that name is registered."""


class UnsupportedShape(ScheduleError):
    """The schedule does not exist for these numbers of ranks, stages or micro-batches."""


class NotationError(ScheduleError):
    """Text that is not an action, a program or a schedule."""


class InvalidSchedule(ScheduleError):
    """`pipeloom.verify` found violations; the message draws each one."""


class CostError(PipeloomError, ValueError):
    """Costs that are negative, of the wrong length or of an unknown name."""


class SplitError(PipeloomError, ValueError):
    """A model that cannot be cut into the stages that were asked for."""


class UncuttableCode(SplitError):
    """What the model's own code does allows no such cut; other cuts, or a change of that code, help."""


class BatchError(PipeloomError, ValueError):
    """Inputs that cannot be cut into micro-batches, or outputs that cannot be merged."""


class LossError(PipeloomError, ValueError):
    """A loss or a target that cannot be used."""


class NonFiniteLoss(LossError):
    """The loss of a micro-batch is NaN or infinite.

    Attributes:
        step_index: the step, counted from 0.
        microbatch: the first micro-batch whose loss is not finite.
    """

    def __init__(self, message: str, *, step_index: int, microbatch: int, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.step_index = step_index
        self.microbatch = microbatch


class RuntimeStateError(PipeloomError, RuntimeError):
    """A pipeline that was closed, unwrapped, or is used while a step runs."""


class DrawError(PipeloomError, RuntimeError):
    """Random numbers inside a unit that would depend on which rank runs it, and when."""


class ParityError(PipeloomError, RuntimeError):
    """A pipelined step that does not compute what the un-pipelined model computes.

    Attributes:
        comparison: of the loss and every gradient (`pipeloom.parity.Comparison`).
    """

    def __init__(self, message: str, hint: str | None = None, *, comparison: Any) -> None:
        super().__init__(message, hint)
        self.comparison = comparison


class ProcessError(PipeloomError, RuntimeError):
    """Processes that do not find each other, or do not do the same."""


class SaidElsewhere(ProcessError):
    """Another rank has found what is wrong; it says so, and this one ends without a word."""


class PeerFailed(PipeloomError, RuntimeError):
    """Another process of the pipeline failed, was killed, stalled or ended; the last line says who, where and how.

    Attributes:
        cause: rank, kind, place, message and traceback, the same on every rank (`pipeloom.peers.Cause`).
    """

    def __init__(self, message: str, *, cause: Any, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.cause = cause


class ConfigError(PipeloomError, ValueError):
    """A configuration key or value that `pipeloom train` cannot use."""


class DataError(PipeloomError, ValueError):
    """Training text that is missing or cannot be read."""


class CheckpointError(PipeloomError, RuntimeError):
    """A checkpoint that is damaged, incomplete or belongs to another model."""


class PipeloomWarning(UserWarning):
    """Something that runs, but probably not as meant."""


def near(given: str, known: Iterable[str]) -> str | None:
    """Return "did you mean …?" for the known names closest to ``given``, or None."""
    matches = difflib.get_close_matches(given.lower(), list(known), n=3, cutoff=0.4)
    return f"did you mean {' or '.join(repr(match) for match in matches)}?" if matches else None


def one_of(given: Any, known: Iterable[str], name: str, error: type[PipeloomError]) -> Any:
    """``given`` if it is one of the known words, else an ``error`` that names them."""
    words = list(known)
    if given not in words:
        raise error(f"{name}={given!r} was given; one of {', '.join(map(repr, words))} is needed")
    return given
