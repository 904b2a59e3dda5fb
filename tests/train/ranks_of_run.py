"""What each process of a test runs: the command line, as a rank."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from pipeloom import cli
from pipeloom.train.loop import Loop


def classifier() -> nn.Sequential:
    """No model of bytes."""
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 10))


def train(place: Path, words: Sequence[str], spoiled_rank: int = -1, spoiled_step: int = 0) -> None:
    """Run `pipeloom train WORDS` in a folder, and end with its code.

    Args:
        place: the folder.
        words: of the command line.
        spoiled_rank: who raises an exception of its own between steps, or gets SIGTERM.
        spoiled_step: after which step; negative for SIGTERM.
    """
    os.chdir(place)
    step = Loop.step

    def spoiled(loop: Loop):
        if loop.step_index == spoiled_step:
            raise ValueError("the user's own mistake")
        if loop.step_index == -spoiled_step:
            signal.raise_signal(signal.SIGTERM)
        return step(loop)

    if int(os.environ["RANK"]) == spoiled_rank:
        Loop.step = spoiled
    try:
        code = cli.main(["train", *words])
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
