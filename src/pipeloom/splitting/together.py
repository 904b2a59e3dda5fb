"""Which calls of units one stage has to run, because of memory that they share. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from pipeloom.errors import UncuttableCode
from pipeloom.recording.ops import Kind, Recording, Value
from pipeloom.standins.followed import Place

_MEMORY = (
    "memory is shared between them and written: a buffer, a tensor and a view of it that is written into, or an object "
    "in which tensors are kept; each stage would have a graph, or a copy, of its own"
)


class Bond(NamedTuple):
    """Calls of units that no cut may separate.

    Args:
        first: the first of them, counted among the calls of units.
        last: the last.
        why: in words, of "the former" and "the latter".
    """

    first: int
    last: int
    why: str = _MEMORY


def together(recording: Recording, owned: Collection[Place]) -> list[Bond]:
    """Ranges of calls that a cut may not separate.

    Two stages can neither use one Python object at the same time, nor write one buffer, nor see in a tensor what
    another stage writes into memory that it shares: each has a graph of its own, and in other processes memory of its
    own.

    Args:
        recording: its calls of units are counted.
        owned: buffers of parents that a value of a stage is written into, by module and name.
    """
    unit_of = _units_of(recording)
    written = {module for module, _ in recording.written_buffers}
    found: dict[Any, list[int]] = defaultdict(list)
    for op in recording.ops:
        if op.kind is Kind.UNIT and any(each == op.what or each.startswith(f"{op.what}.") for each in written):
            found[op.what].append(unit_of[op.index])
        if op.kind is Kind.UNIT:
            for units in recording.sharing:
                if op.what in units:
                    found[units].append(unit_of[op.index])
        for place in op.weights:
            if place in owned:
                found[place].append(unit_of[op.index])
    ranges = [(calls[0], calls[-1]) for calls in found.values()]
    ranges += _shared_writes(recording, unit_of)
    bonds = {Bond(first, last) for first, last in ranges}
    bonds |= {Bond(unit_of[i], unit_of[op.index], why) for op in recording.ops for i, why in op.bonds.items()}
    return sorted(bond for bond in bonds if bond.first < bond.last)


def check_together(bonds: Collection[Bond], stages: Sequence[int], recording: Recording) -> None:
    """Raise for inputs with which the model's code does what the cut, made by others, separates.

    Args:
        bonds: of these inputs.
        stages: of each call of a unit.
        recording: of these inputs.

    Raises:
        UncuttableCode: it is so.
    """
    for first, last, why in bonds:
        if stages[first] != stages[last]:
            one, other = (recording.unit_ops[each].what for each in (first, last))
            raise UncuttableCode(
                f"with these inputs {one!r} of stage {stages[first]} and {other!r} of stage {stages[last]} would have "
                f"to be in one stage: {why}. With the inputs by which the model was cut it was not so",
                f"cut it by inputs that take this way (example_args=), or have all from {one!r} to {other!r} in one "
                "stage with cuts=",
            )


def _units_of(recording: Recording) -> list[int]:
    """Per op the call of a unit that ran last, whose stage is its own."""
    found, index = [], -1
    for op in recording.ops:
        index += op.kind is Kind.UNIT
        found.append(max(index, 0))
    return found


def _shared_writes(recording: Recording, unit_of: list[int]) -> list[tuple[int, int]]:
    """Where a tensor that is used later shares memory with one that is written: from where it was made to the write."""
    last = _last_uses(recording, unit_of)
    found = []
    for op in recording.ops:
        for leaf, before in op.holders.items():
            made = unit_of[before.op] if before.op >= 0 else 0
            if max(last.get(before, -1), last.get(Value(op.index, leaf), -1)) > made:
                found.append((made, unit_of[op.index]))
    return found


def _last_uses(recording: Recording, unit_of: list[int]) -> dict[Value, int]:
    found: dict[Value, int] = {}
    for op in recording.ops:
        found.update(dict.fromkeys(op.inputs, unit_of[op.index]))
    return found | dict.fromkeys(recording.results, len(recording.unit_ops))
