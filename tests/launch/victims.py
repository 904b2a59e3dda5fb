"""A model for ``--model tests.launch.victims:model``: who builds it may be killed, or fail, at a chosen moment.

The environment's VICTIM says when: "RANK MOMENT NUMBER ATTEMPT", as "1 step 3 0": rank 1 is killed before its third
step, the first time that it is started; the attempt "all" means each time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from torch import nn

from pipeloom.train.config import ModelConfig
from pipeloom.train.gpt import gpt
from pipeloom.train.held_out import HeldOut
from pipeloom.train.loop import Loop
from tests.archive.samples import die_at


def model(section: ModelConfig) -> nn.Sequential:
    """The usual model."""
    rank, moment, number, attempt = os.environ.get("VICTIM", "- - 0 -").split()
    if rank == os.environ.get("RANK") and attempt in ("all", os.environ["TORCHELASTIC_RESTART_COUNT"]):
        ARMED[moment](int(number))
    return gpt(section)


def die(*_: object) -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    """Raise, outside a step of the pipeline."""
    raise ValueError("the user's own mistake")


def before(owner: type, name: str, act: Callable[[], None]) -> Callable[[int], None]:
    """Return what makes ``act`` happen before the n-th call of a method."""

    def arm(number: int) -> None:
        method, calls = getattr(owner, name), []

        def counting(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == number:
                act()
            return method(*args)

        setattr(owner, name, counting)

    return arm


ARMED = {
    "start": die,
    "step": before(Loop, "step", die),
    "evaluation": before(HeldOut, "_loss_sum", die),
    "save": die_at,
    "mistake": before(Loop, "step", fail),
}
