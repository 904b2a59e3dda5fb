"""A pipeline that one rank spoils before its ranks have met: while it makes the model, or cuts it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients
from tests.processes.ranks import note_failure

WIDTH = 8
NUM_RANKS = 3
_OVER: list[str] = []
"""What has happened in this process."""


@dataclass
class Spoiler:
    """What happens on one rank, at some moment, once.

    Args:
        kind: "raise", "kill", "exit" or "stall".
        moment: "factory", "weights", "schedule", "dry run", "numbers" (a forward with them), "batch" or "late".
        rank: to whom.
        folder: where the moment is noted.
        limit_s: `wait_limit_s`.
        has_example: cut the model in the constructor.
        has_other: make a pipeline before, and run it.
    """

    kind: str
    moment: str
    rank: int
    folder: Path
    limit_s: float = 60.0
    has_example: bool = False
    has_other: bool = False

    def come_to(self, moment: str) -> None:
        """Let it happen, if this is the rank and the moment."""
        if moment != self.moment or _OVER or not self.is_here:
            return
        _OVER.append(moment)  # not in the spoiler, of which a dry run has a copy
        note_failure(self.folder)
        if self.kind == "raise":
            raise ValueError("the user's own mistake")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "exit":
            sys.exit(3)
        time.sleep(3600)

    @property
    def is_here(self) -> bool:
        """Whether this is the rank."""
        return int(os.environ["RANK"]) == self.rank

    def wrong(self, moment: str) -> bool:
        """Whether to give the pipeline something wrong now."""
        if not self.is_here or moment != self.moment:
            return False
        note_failure(self.folder)
        return True


class Layers(nn.Module):
    """A model that is cut by running it."""

    def __init__(self, spoiler: Spoiler | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 * NUM_RANKS))
        self.spoiler = spoiler

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → a loss."""
        for layer in self.layers:
            x = layer(x).tanh()
            if self.spoiler is not None:
                self.spoiler.come_to("dry run")
        return x.square().mean()


class Real(nn.Linear):
    """Knows numbers from a dry run."""

    spoiler: Spoiler | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → the same."""
        if self.spoiler is not None and type(x) is Tensor and x.device.type == "cpu":
            self.spoiler.come_to("numbers")
        return super().forward(x)


def _made(spoiler: Spoiler) -> nn.Module:
    spoiler.come_to("factory")
    torch.manual_seed(0)
    made = Layers(spoiler)
    for layer in made.layers:
        layer.__class__ = Real
        layer.spoiler = spoiler
    return made


def _pipeline(spoiler: Spoiler) -> pl.Pipeline:
    x = torch.ones(2, WIDTH)
    return pl.Pipeline(
        factory=lambda: _made(spoiler),
        num_stages=NUM_RANKS,
        num_microbatches=4,
        wait_limit_s=spoiler.limit_s,
        weights="/no/such/folder" if spoiler.wrong("weights") else None,
        schedule="2f2b" if spoiler.wrong("schedule") else "1f1b",
        example_args=(x,) if spoiler.has_example else (),
    )


def trains(spoiler: Spoiler) -> None:
    """Two steps."""
    if spoiler.has_other:
        other = pl.Pipeline(Layers(None), num_stages=NUM_RANKS, num_microbatches=4)
        other.step(torch.ones(8, WIDTH))
    spoiler.come_to("late")
    pipe = _pipeline(spoiler)
    for _ in range(2):
        pipe.step(torch.ones(3 if spoiler.wrong("batch") else 8, WIDTH))
    sys.stdout.write("trained\n")


def tries_again(spoiler: Spoiler) -> None:
    """A first step that fails on one rank; all catch that, and the second attempt has the bits of the oracle."""
    pipe, reference = _pipeline(spoiler), Layers(None)
    torch.manual_seed(0)
    reference = Layers(None)
    x = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)
    with pytest.raises((ValueError, pl.errors.PeerFailed), match="the user's own mistake") as raised:
        pipe.step(x)
    assert isinstance(raised.value, ValueError) == spoiler.is_here
    assert getattr(raised.value, "cause", None) is None or raised.value.cause.rank == spoiler.rank
    found = pipe.step(x)
    assert_bit_equal(found, sequential_step(reference, x, num_stages=NUM_RANKS, num_microbatches=4), "loss")
    assert_same_gradients(pipe, reference)
    pipe.close()


def goes_on_without(spoiler: Spoiler) -> None:
    """The rank catches what its constructor raised, and lives on; the others end all the same."""
    pipe = None
    with contextlib.suppress(ValueError):
        pipe = _pipeline(spoiler)
    if pipe is None:
        time.sleep(10)
        return
    pipe.step(torch.ones(8, WIDTH))


def is_refused_alike(_: Spoiler) -> None:
    """The same mistake on all ranks, made and caught again and again, is the same error on each of them."""
    for _ in range(10):
        with pytest.raises(pl.errors.UnknownSchedule):
            pl.Pipeline(Layers(None), num_stages=NUM_RANKS, schedule="2f2b")
    trains(Spoiler("raise", "never", 0, Path()))


def is_closed_unused(_: Spoiler) -> None:
    """Pipelines that never ran are closed, or let go; those made after them run."""
    _pipeline(Spoiler("raise", "never", 0, Path())).close()
    with _pipeline(Spoiler("raise", "never", 0, Path())) as pipe:
        assert repr(pipe)
    assert isinstance(_pipeline(Spoiler("raise", "never", 0, Path())).unwrap(), Layers)
    _pipeline(Spoiler("raise", "never", 0, Path()))
    trains(Spoiler("raise", "never", 0, Path()))
