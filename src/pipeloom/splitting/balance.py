"""Where to cut a chain so that its heaviest part is as light as possible.

Cutting into equal numbers of layers puts an embedding and a block on the same footing. The optimum over all
cuts of a chain is a textbook dynamic programme, so nothing less is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced_cuts(weights: Sequence[float], num_parts: int) -> list[int]:
    """Cut ``weights`` into consecutive, non-empty parts with the least possible heaviest part.

    Args:
        weights: one non-negative weight per item.
        num_parts: from 1 to the number of items.

    Returns:
        The index of the first item of every part but the first, ascending: what ``cuts=`` takes.
    """
    sums = [0.0, *accumulate(weights)]
    num_items = len(weights)
    # heaviest[end]: the least heaviest part over all ways to cut items [0, end) into the parts counted so far.
    heaviest = sums[:]
    starts: list[list[int]] = []
    for part in range(1, num_parts):
        best, start_of = [float("inf")] * (num_items + 1), [0] * (num_items + 1)
        for end in range(part + 1, num_items + 1):
            choices = ((max(heaviest[start], sums[end] - sums[start]), start) for start in range(part, end))
            best[end], start_of[end] = min(choices)
        heaviest = best
        starts.append(start_of)
    return _walk_back(starts, num_items)


def _walk_back(starts: list[list[int]], end: int) -> list[int]:
    cuts = []
    for start_of in reversed(starts):
        end = start_of[end]
        cuts.append(end)
    return cuts[::-1]
