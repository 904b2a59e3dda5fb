"""`pipeloom train`: words first, torch later, so that ``--help`` and a misspelt flag answer at once."""

from __future__ import annotations

import sys

from pipeloom.train.flags import parse_flags


def run(argv: list[str]) -> int:
    """Train a model through a pipeline.

    Returns:
        0, or 130 after Ctrl-C.

    Raises:
        PipeloomError: whatever the user can put right.
    """
    invocation = parse_flags(argv)
    from rich.console import Console

    from pipeloom.train.job import train

    return train(invocation, Console(file=sys.stdout))
