"""How a model is cut, as a value: what `pipeloom.split` returns, in figures, JSON and text.

A `Split` holds the modules; whoever keeps one keeps the weights, and nobody can print it. This holds names and numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

_Columns = dict[str, Callable[[Any], str]]
_WIDTH = 120
_MOST_LINKS = 4
"""Other stages that a row names."""
_MOST_VALUES = 40
"""Rows of values that cross, in text; JSON has all."""


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One call of a module that no cut separates.

    Args:
        name: the module's, in the whole model.
        kind: its class.
        call: which call of this module within one forward.
        stage: the stage that runs it.
        num_parameters: of the module, each once; a module that is called again has the same ones.
        num_flops: of the call, in the forward; None if the model was not run.
    """

    name: str
    kind: str
    call: int
    stage: int
    num_parameters: int
    num_flops: int | None


@dataclass(frozen=True, slots=True)
class GlueCall:
    """One function of torch that the code of a module which no stage has whole calls by itself.

    Args:
        what: the function.
        module: the module whose code called it; "" is the model.
        stage: the stage that runs it; None: every stage does, because nothing but the model's inputs is needed.
        num_flops: in the forward.
    """

    what: str
    module: str
    stage: int | None
    num_flops: int


@dataclass(frozen=True, slots=True)
class CrossingValue:
    """A tensor that goes from one stage to others.

    Args:
        made_by: the unit that returned it and the path within what it returned; or the glue, or the input.
        from_stage: where it was made.
        to_stages: the stages that use it; each gets it once, straight from where it was made.
        shape: of the example inputs.
        dtype: as ``float32``.
        num_bytes: of one such tensor.
        needs_grad: a gradient comes back.
    """

    made_by: str
    from_stage: int
    to_stages: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    needs_grad: bool


@dataclass(frozen=True, slots=True)
class StageOutline:
    """One stage.

    Args:
        stage: its index.
        units: the names of its calls of units, in order.
        glue_parameters: names of parameters that it has for its glue (a class token), or that nobody used.
        num_parameters: that it holds, each once; another stage may hold one of them too.
        parameter_bytes: of these.
        num_buffers: elements of buffers of its units.
        buffer_bytes: of these.
        num_flops: of its units and glue, in the forward; None if the model was not run.
        receives: bytes per stage that it receives from; None if the model was not run.
        sends: bytes per stage that it sends to.
    """

    stage: int
    units: tuple[str, ...]
    glue_parameters: tuple[str, ...]
    num_parameters: int
    parameter_bytes: int
    num_buffers: int
    buffer_bytes: int
    num_flops: int | None
    receives: tuple[tuple[int, int], ...] | None
    sends: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter with several names, or in several stages.

    Args:
        names: all its names.
        stages: the stages that hold it.
        num_parameters: its elements.
        num_bytes: of one copy.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Outline:
    """A model, cut. ``str()`` is a table, `to_json` has all there is.

    Args:
        model: its class.
        units: the calls of units, in order.
        glue: the calls between them, in order.
        stages: the stages, in order.
        values: what crosses cuts, in the order in which it is made; None if the model was not run.
        shared: parameters with several names, or in several stages.
        num_parameters: of the model, each once.
        parameter_bytes: of these.
        num_buffers: elements of buffers.
        buffer_bytes: of these, each once.
        everywhere_buffer_bytes: those that belong to no unit; every stage has them.
        num_flops: of a forward with the example inputs; None if the model was not run.
    """

    model: str
    units: tuple[UnitCall, ...]
    glue: tuple[GlueCall, ...]
    stages: tuple[StageOutline, ...]
    values: tuple[CrossingValue, ...] | None
    shared: tuple[SharedParameter, ...]
    num_parameters: int
    parameter_bytes: int
    num_buffers: int
    buffer_bytes: int
    everywhere_buffer_bytes: int
    num_flops: int | None

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.stages)

    def as_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists and numbers; ``receives`` and ``sends`` by the other stage's index, as text."""
        made = asdict(self) | {"num_stages": self.num_stages}
        for stage in made["stages"]:
            for key in ("receives", "sends"):
                stage[key] = None if stage[key] is None else {str(other): size for other, size in stage[key]}
        listed: dict[str, Any] = json.loads(json.dumps(made))  # tuples as the lists that a reader of JSON gets
        return listed

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.as_dict())

    def __str__(self) -> str:
        return "\n".join(_text(self))


def _text(outline: Outline) -> list[str]:
    lines = [*_head(outline), "", *_stages(outline.stages)]
    if outline.values:
        shown = outline.values[:_MOST_VALUES]
        lines += ["", *_table(_VALUE_COLUMNS, shown, widest=0)]
        if len(outline.values) > len(shown):
            lines.append(f"… and {len(outline.values) - len(shown)} more values")
    elif outline.values is None:
        lines += ["", "What crosses the cuts is not known without example inputs."]
    lines += ["", *(_shared_line(each) for each in outline.shared)] if outline.shared else []
    return lines


def _head(outline: Outline) -> list[str]:
    size = f"{outline.num_parameters:,} parameters ({in_bytes(outline.parameter_bytes)})"
    if outline.buffer_bytes:
        own = f", {in_bytes(outline.everywhere_buffer_bytes)} of them in every stage"
        size += f", {in_bytes(outline.buffer_bytes)} of buffers{own if outline.everywhere_buffer_bytes else ''}"
    if outline.num_flops is not None:
        size += f", {in_flops(outline.num_flops)} in a forward"
    names = {each.name for each in outline.units}
    calls = f"{_counted(len(outline.units), 'call')} of {_counted(len(names), 'unit')}"
    return [f"{outline.model}: {calls}, {_counted(outline.num_stages, 'stage')}", size, *_glue_lines(outline)]


def _glue_lines(outline: Outline) -> list[str]:
    if not outline.glue:
        return []
    counts = [(stage, len([*each])) for stage, each in groupby(sorted(_stage(each) for each in outline.glue))]
    where = [f"{count} on every stage" if stage < 0 else f"{count} on stage {stage}" for stage, count in counts]
    return _wrapped(f"{_counted(len(outline.glue), 'piece')} of glue: ", where)


def _stage(glue: GlueCall) -> int:
    return -1 if glue.stage is None else glue.stage


def _shared_line(shared: SharedParameter) -> str:
    names, stages = " = ".join(shared.names), ", ".join(map(str, shared.stages))
    noun = "stage" if len(shared.stages) == 1 else "stages"
    tail = f": one parameter of {in_bytes(shared.num_bytes)}, {noun} {stages}"
    return _cut(names, _WIDTH - len(tail)) + tail


def _stages(stages: Sequence[StageOutline]) -> list[str]:
    """The table of stages, with names as long as they fit."""
    lines: list[str] = []
    for width in (60, 40, 30, 24, 18):
        columns: _Columns = {**_STAGE_COLUMNS, "<units": partial(_units, width=width)}
        lines = _table(columns, stages, widest=1)
        if lines == _table(columns, stages, widest=1, limit=sys.maxsize):
            break
    return lines


def _units(stage: StageOutline, width: int = 60) -> str:
    units = stage.units
    if len(units) > 1:
        ends = (_cut(units[0], width), _cut(units[-1], width))
        text = f"{ends[0]} … {ends[1]} ({len(units)})" if len(units) > 2 else ", ".join(ends)
    else:
        text = units[0] or "(the model)" if units else "-"
    return f"{text} + {len(stage.glue_parameters)} for glue" if stage.glue_parameters else text


def _links(links: tuple[tuple[int, int], ...] | None, word: str) -> str:
    if links is None:
        return "?"
    if not links:
        return "-"
    more = ", …" if len(links) > _MOST_LINKS else ""
    others = ", ".join(str(stage) for stage, _ in links[:_MOST_LINKS])
    return f"{in_bytes(sum(num_bytes for _, num_bytes in links))} {word} {others}{more}"


_STAGE_COLUMNS: _Columns = {
    ">stage": lambda each: str(each.stage),
    "<units": _units,
    ">parameters": lambda each: f"{each.num_parameters:,}",
    ">bytes": lambda each: in_bytes(each.parameter_bytes + each.buffer_bytes),
    ">FLOPs": lambda each: "?" if each.num_flops is None else in_flops(each.num_flops).removesuffix("FLOPs"),
    "<receives": lambda each: _links(each.receives, "from"),
    "<sends": lambda each: _links(each.sends, "to"),
}
_VALUE_COLUMNS: _Columns = {
    "<value": lambda each: each.made_by,
    ">from": lambda each: str(each.from_stage),
    "<to": lambda each: ", ".join(map(str, each.to_stages)),
    "<shape": lambda each: f"({', '.join(map(str, each.shape))})",
    "<dtype": lambda each: each.dtype,
    ">bytes": lambda each: in_bytes(each.num_bytes),
    "<gradient": lambda each: "yes" if each.needs_grad else "no",
}


def _table(columns: _Columns, rows: Sequence[Any], widest: int, limit: int = _WIDTH) -> list[str]:
    """Aligned columns; names begin with the side; the column at ``widest`` gives way where a line gets too long."""
    cells = [[name[1:] for name in columns], *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for index in (widest, len(widths) - 1, len(widths) - 2, 2):
        spare = sum(widths) + 2 * (len(widths) - 1) - limit
        widths[index] = max(min(widths[index], 16), widths[index] - max(spare, 0))
    sides = [name[0] for name in columns]
    return [
        "  ".join(
            f"{_cut(cell, width):{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in cells
    ]


def _cut(text: str, width: int) -> str:
    """The text, or its ends: names differ at the front and at the back."""
    if len(text) <= width:
        return text
    front = (width - 1) // 2
    return f"{text[:front]}…{text[len(text) - (width - 1 - front) :]}"


def _wrapped(head: str, parts: Sequence[str]) -> list[str]:
    lines = [head]
    for index, part in enumerate(parts):
        piece = part if index == len(parts) - 1 else f"{part}, "
        if len(lines[-1]) + len(piece.rstrip()) > _WIDTH:
            lines.append("  ")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_bytes(number: int) -> str:
    """Bytes for a reader: ``7 B``, ``64.0 MiB``."""
    value, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"


def in_flops(number: int) -> str:
    """FLOPs for a reader: ``12.5 GFLOPs``."""
    value, unit = float(number), ""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if value < 1000 or unit == "E":
            break
        value /= 1000
    return f"{number} FLOPs" if unit == "" else f"{value:.1f} {unit}FLOPs"
