"""The rows as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from benchmarks.peers.figures import TOLERANCE, MemoryRow, Row, Spread

TITLES = {
    "a": "(a) Stages that wait 10 ms forward and 20 ms backward: what a step takes beyond its simulated makespan",
    "b": "(b) Stages that do nothing: step ÷ compute actions of one rank, ms",
    "c": "(c) The default GPT of `pipeloom train`, one thread a process: tokens a second",
    "d": "(d) Peak resident memory of each rank in (c), in processes of its own: MiB (of it above an idle process)",
}
SHOWN: dict[str, Callable[[float], str]] = {
    "excess": lambda value: f"{value:.1%}".replace("%", " %"),
    "step_s_per_action": lambda value: f"{value * 1e3:.2f}",
    "tokens_per_s": lambda value: f"{value:,.0f}",
}
NAMES = {
    "pipeloom": "Pipeloom",
    "torch": "torch",
    "by_hand": "by hand",
    "one_process": "one process",
    "deepspeed": "DeepSpeed",
}
MEBIBYTE = 2**20
SHAPE_WIDTH = 15


def table(rows: Sequence[Row | MemoryRow]) -> str:
    """Every part under its title, in the order of the rows."""
    return "\n\n".join("\n".join(_part(name, list(part))) for name, part in groupby(rows, lambda row: row.row))


def _part(name: str, rows: Sequence[Row | MemoryRow]) -> Iterator[str]:
    yield TITLES[name]
    timed = [row for row in rows if isinstance(row, Row)]
    if timed:
        yield from _timed(timed)
    for row in rows:
        if isinstance(row, MemoryRow):
            yield _memory(row)


def _timed(rows: Sequence[Row]) -> Iterator[str]:
    peers = list(rows[0].peers)
    cells = [[_cell(row.unit, row.peers[peer]) for peer in peers] for row in rows]
    heads = [NAMES[peer] for peer in peers]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    yield _line(" " * SHAPE_WIDTH, heads, widths, "Pipeloom ÷ torch")
    for row, line in zip(rows, cells, strict=True):
        yield _line(_shape(row), line, widths, _verdict(row))
    if rows[0].unit == "step_s_per_action":
        yield "CPU of all ranks together ÷ all their compute actions, ms"
        yield from (_cpu(row, peers, widths) for row in rows)
    if (difference := rows[0].loss_difference) is not None:
        yield _comparable(difference, is_void=rows[0].is_void)


def _cpu(row: Row, peers: Sequence[str], widths: Sequence[int]) -> str:
    num_actions = 2 * row.num_ranks * row.num_microbatches
    cells = [SHOWN[row.unit](row.cpu_s_per_step[peer] / num_actions) for peer in peers]
    return _line(_shape(row), cells, widths, "")


def _shape(row: Row) -> str:
    shape = f"{row.schedule:<5}  {row.num_ranks} × {row.num_microbatches}"
    return f"{shape:<{SHAPE_WIDTH}}"


def _line(shape: str, cells: Sequence[str], widths: Sequence[int], verdict: str) -> str:
    aligned = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    return "  ".join([shape, *aligned, verdict]).rstrip()


def _cell(unit: str, spread: Spread) -> str:
    shown = SHOWN[unit]
    ends = sorted((spread.first_quartile, spread.third_quartile))
    return f"{shown(spread.median)} [{shown(ends[0])}, {shown(ends[1])}]"


def _verdict(row: Row) -> str:
    if row.bar is None:
        return "void" if row.is_void else "-"
    return f"{row.bar.ratio:.2f}, needed {row.bar.needed}: {'met' if row.bar.is_met else 'MISSED'}"


def _comparable(difference: float, *, is_void: bool) -> str:
    said = f"Losses of the first steps differ by at most {difference:.0e} of their size between peers"
    return f"{said}; {TOLERANCE:.0e} is allowed{': VOID, they do not compute the same' if is_void else ''}."


def _memory(row: MemoryRow) -> str:
    ranks = zip(row.peak_bytes, row.above_idle_bytes, strict=True)
    shown = (f"{_mebibytes(peak)} ({_mebibytes(above)})" for peak, above in ranks)
    ratio = "" if row.ratio is None else f"{row.ratio:.2f} of torch's"
    return f"{NAMES[row.peer]:<{SHAPE_WIDTH}}  {', '.join(shown):<24}  {ratio}".rstrip()


def _mebibytes(count: int | None) -> str:
    return "?" if count is None else f"{count / MEBIBYTE:.0f}"
