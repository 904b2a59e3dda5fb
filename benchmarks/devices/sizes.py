"""Which sizes of pipelines a benchmark is asked for."""

from __future__ import annotations

import argparse


def sizes(given: str) -> list[tuple[int, int]]:
    """Ranks and micro-batches of each size, from ``4x8,8x32``.

    Raises:
        ArgumentTypeError: it says something else.
    """
    try:
        return [(int(ranks), int(count)) for ranks, count in (size.split("x") for size in given.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r} was given; sizes like 4x8,8x32 are needed") from None
