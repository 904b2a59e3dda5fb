"""What recomputation costs and saves, and what receives that are posted early take up, in a few lines of words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeloom.ir import Schedule, Timeline
from pipeloom.ir.slots import peak_receive_bytes, peak_receive_slots


def describe_others(timelines: Mapping[str, Timeline]) -> Iterator[str]:
    """A line for each of some timelines of the same work, under the words that say what is different."""
    for words, timeline in timelines.items():
        held = timeline.peak_activation_bytes or ()
        more = f", activations at most {' '.join(map(str, held))} bytes" if any(held) else ""
        yield f"{words}: makespan {timeline.makespan_s:.6g} s{more}"


def figures_of_others(timelines: Mapping[str, Timeline]) -> dict[str, object]:
    """The same in figures, in seconds and bytes."""
    return {
        words: {"makespan_s": each.makespan_s, "peak_activation_bytes": each.peak_activation_bytes}
        for words, each in timelines.items()
    }


def describe_receives(lowered: Schedule, boundary_bytes: tuple[int, ...]) -> Iterator[str]:
    """How many receive buffers each rank needs; in bytes too, where the size of messages is known."""
    yield f"Receive buffers, at most: {' '.join(map(str, peak_receive_slots(lowered)))} messages, by GPU"
    if boundary_bytes:
        yield f"Their size: {' '.join(map(str, peak_receive_bytes(lowered, boundary_bytes)))} bytes, by GPU"
