"""A timeline drawn as a ladder of text: a line per rank, time to the right.

A table with a column per slot fits only actions of one length. Here an action is as wide as it lasts: it begins
and ends at the column of its start and end, so a B of two ticks is drawn ``B0---`` over two cells, and a dot
stands for each cell in which a rank idles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pipeloom.ir import Action, Kind, Span, Timeline

_COLOURS = {
    Kind.FORWARD: "34",
    Kind.BACKWARD: "32",
    Kind.INPUT_GRAD: "36",
    Kind.WEIGHT_GRAD: "33",
    Kind.RECOMPUTE: "35",
}
_DIM = "2"
_CUT = "…"

Piece = tuple[str, str | None]
"""Text and its ANSI colour, None for none."""


def draw(timeline: Timeline, tick_s: float, *, width: int | None = None, is_coloured: bool = False) -> str:
    """Draw a timeline; transfers are not drawn. Prose says rank, drawings say GPU.

    Args:
        timeline: predicted or measured.
        tick_s: seconds that one cell stands for; a cell is as wide as the widest label, and a space.
        width: columns at which a line is cut, with ``…``; None: never.
        is_coloured: colour the actions with ANSI codes, by kind; what is coloured is also written out.

    Returns:
        One line per rank, the last without a line break.
    """
    ladder = _Ladder.of(timeline, tick_s)
    num_ranks = timeline.schedule.num_ranks
    digits = len(str(num_ranks - 1))
    lines = []
    for rank in range(num_ranks):
        pieces = [(f"GPU {rank:>{digits}}: ", None), *ladder.pieces(timeline.spans(rank))]
        kept = _cut(pieces, width)
        lines.append("".join(_painted(kept) if is_coloured else (text for text, _ in kept)).rstrip())
    return "\n".join(lines)


def shortest_action_s(timeline: Timeline) -> float:
    """Seconds of the shortest computation that takes any time: the finest tick that a drawing needs; or 1."""
    return min((span.duration_s for span in timeline if _is_drawn(span)), default=1.0)


@dataclass(frozen=True, slots=True)
class _Ladder:
    """The scale of a drawing.

    Args:
        label_width: columns of the widest label.
        columns_per_s: columns of a second.
        origin_s: what is drawn at column 0.
        num_columns: where the last action ends.
        has_stages: whether labels name the stage, because a rank holds several.
    """

    label_width: int
    columns_per_s: float
    origin_s: float
    num_columns: int
    has_stages: bool

    @classmethod
    def of(cls, timeline: Timeline, tick_s: float) -> _Ladder:
        schedule = timeline.schedule
        has_stages = schedule.num_stages > schedule.num_ranks
        labels = (_label(action, has_stages) for action in schedule if action.kind.is_compute)
        label_width = max(map(len, labels), default=1)
        columns_per_s = (label_width + 1) / tick_s
        num_columns = _rounded(timeline.makespan_s * columns_per_s)
        return cls(label_width, columns_per_s, timeline.start_s, num_columns, has_stages)

    def pieces(self, spans: Iterable[Span]) -> Iterator[Piece]:
        """One rank: its idle cells and its actions, from column 0 to the end of the drawing."""
        column = 0
        for span in _side_by_side(filter(_is_drawn, spans)):
            start, end = self.column(span.start_s), self.column(span.end_s)
            yield self.idle(column, start), _DIM
            yield self.block(span.action, end - start), _COLOURS[span.action.kind]
            column = end
        yield self.idle(column, self.num_columns), _DIM

    def column(self, time_s: float) -> int:
        return _rounded((time_s - self.origin_s) * self.columns_per_s)

    def idle(self, start: int, end: int) -> str:
        """A dot under the end of each cell that lies between two columns as a whole."""
        cell = self.label_width + 1
        cells = range(-(-start // cell) * cell, end - cell + 1, cell)
        before = " " * (cells.start - start) if cells else ""
        return (before + ". ".rjust(cell) * len(cells)).ljust(end - start)

    def block(self, action: Action, width: int) -> str:
        """The label, right-aligned in the first cell, a line as long as the action lasts, and a space."""
        label = _label(action, self.has_stages).rjust(self.label_width)
        return f"{label[: width - 1]:-<{width - 1}} " if width > 1 else label[:width]


def _rounded(columns: float) -> int:
    """Halves always upwards: two that are a whole number apart must not be rounded apart; nor by float noise."""
    return math.floor(columns + 0.5 + 1e-6)


def _label(action: Action, has_stage: bool) -> str:
    return str(action) if has_stage else f"{action.kind.text}{action.microbatch}"


def _side_by_side(spans: Iterable[Span]) -> Iterator[Span]:
    """What runs at the same time on one rank, as two of a pair do, shares the time in the drawing."""
    last: Span | None = None
    for span in spans:
        if last is not None and span.start_s < last.end_s:
            start_s, end_s = min(last.start_s, span.start_s), max(last.end_s, span.end_s)
            middle_s = (start_s + end_s) / 2
            last = replace(last, start_s=start_s, end_s=middle_s)
            span = replace(span, start_s=middle_s, end_s=end_s)
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def _is_drawn(span: Span) -> bool:
    return span.action.kind.is_compute and span.end_s > span.start_s


def _cut(pieces: Iterable[Piece], width: int | None) -> list[Piece]:
    """Pieces that fit ``width`` columns; what is cut ends with a mark."""
    kept = list(pieces)
    length = sum(len(text) for text, _ in kept)
    trailing = len(kept[-1][0]) - len(kept[-1][0].rstrip()) if kept else 0
    if width is None or length - max(trailing, 1) <= width:
        return kept
    room = max(width - len(_CUT), 0)
    fitting: list[Piece] = []
    for text, colour in kept:
        fitting.append((text[:room], colour))
        room -= len(fitting[-1][0])
    return [*fitting, (_CUT, None)]


def _painted(pieces: Iterable[Piece]) -> Iterator[str]:
    for text, colour in pieces:
        bare = text.rstrip()
        yield f"\x1b[{colour}m{bare}\x1b[0m{text[len(bare) :]}" if colour and bare else text
