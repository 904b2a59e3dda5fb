"""What a dry run saw: the calls of units and the glue between them, in order, and which values each used and made."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.batch.trees import Structure
from pipeloom.errors import UncuttableCode
from pipeloom.recording.filled import Filled

INPUT = -1
"""The op that made the model's own inputs."""


class Value(NamedTuple):
    """One tensor that an op made, or wrote into.

    Args:
        op: its index; `INPUT` for a leaf of the model's inputs that requires a gradient.
        leaf: which of its tensors.
    """

    op: int
    leaf: int


class Form(NamedTuple):
    """What a value is, but for its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Kind(enum.Enum):
    """Who runs an op.

    ``EVERYWHERE``: its inputs are the model's inputs, buffers and constants, so every stage runs it for itself.
    """

    UNIT = "unit"
    GLUE = "glue"
    EVERYWHERE = "everywhere"


class Same(NamedTuple):
    """An output that is an input: the tensor at this place among the arguments' tensors."""

    position: int


class Target(NamedTuple):
    """A real tensor that an op wrote a placeholder into.

    Args:
        position: among the arguments' tensors.
        is_base: it is not that tensor, but the one which that is a view of.
    """

    position: int
    is_base: bool

    def among(self, tensors: Sequence[Tensor]) -> Any:
        """The tensor itself."""
        found = tensors[self.position]
        return found._base if self.is_base else found


class Effect(NamedTuple):
    """A tensor that leaves a unit other than by return.

    Args:
        target: a context variable and the keys to a list in it, or a module's name and an attribute.
        leaf: where it stands among the op's outputs.
    """

    target: Any
    path: tuple[Any, ...]
    leaf: int


@dataclass(slots=True)
class Op:
    """One call.

    Args:
        index: its place in the order of calls.
        kind: who runs it.
        what: a unit's name, or the function's.
        func: the function; None for a unit.
        call: which call of the unit within one forward; of glue that draws, which by this function in this module.
        inputs: the values that it uses.
        weights: the parameters that glue uses, by module and attribute.
        structure: of what it returned.
        outputs: the leaves of that, and after them what it wrote into and its effects: placeholders, other values as
            they are, `Same` for tensors that it was given.
        num_returned: how many of ``outputs`` are leaves of what it returned.
        effects: of a unit.
        has_draws: whether it draws random numbers.
        num_flops: in the forward.
        module: the module whose code called it.
        holders: per output that it only wrote into by way of another tensor, the value of that memory before.
        has_read: whether it gave Python a number, or a shape, that depends on numbers of the model's inputs.
        read: what that was.
        is_state: whether every stage writes a buffer with it.
        is_of_weights: whether glue makes something of weights alone, neither of inputs nor by chance.
        grads: which of its outputs require a gradient.
        filled: entries of containers among its arguments, which a unit made.
        given: attributes of the unit's modules that code outside of it set before the call, by module and name.
        asked: of a unit, the shapes of the tensors that it is given, and the other values.
        left: plain values that the call left in attributes of the unit's modules.
        raised: what it raised, if it did not return.
        plain: which of its outputs are numbers, flags or text that a unit returned, as the dry run has them.
        bonds: earlier ops that the same stage has to run, and why.
        targets: per output that is a real tensor which a placeholder was written into, where that is found.
    """

    index: int
    kind: Kind
    what: str
    func: Any = None
    call: int = 0
    inputs: tuple[Value, ...] = ()
    weights: tuple[tuple[str, str], ...] = ()
    structure: Structure | None = None
    outputs: list[Any] = field(default_factory=list)
    num_returned: int = 0
    effects: list[Effect] = field(default_factory=list)
    has_draws: bool = False
    num_flops: int = 0
    module: str = ""
    holders: dict[int, Value] = field(default_factory=dict)
    has_read: bool = False
    read: Any = None
    is_state: bool = False
    is_of_weights: bool = False
    grads: set[int] = field(default_factory=set)
    targets: dict[int, Target] = field(default_factory=dict)
    filled: list[Filled] = field(default_factory=list)
    raised: Exception | None = None
    plain: dict[int, Any] = field(default_factory=dict)
    bonds: dict[int, str] = field(default_factory=dict)
    given: tuple[tuple[str, str], ...] = ()
    asked: Any = None
    left: dict[tuple[str, str], Any] = field(default_factory=dict)

    @property
    def draw_name(self) -> str:
        """What random numbers of glue are a function of, with ``call``; it does not change with the units."""
        return f"{self.module}: {self.what}"

    @property
    def uses(self) -> tuple[Value, ...]:
        """The values that it is given, and those that it writes over by way of others."""
        return tuple(dict.fromkeys((*self.inputs, *self.holders.values())))


@dataclass(slots=True)
class Recording:
    """One dry run.

    Args:
        ops: in the order of calls.
        results: the values in what the model returned.
        written_buffers: buffers of parents that the run wrote into, by module and name.
        grad_inputs: which leaves of the model's inputs require a gradient.
        written_inputs: which of the others the run wrote into.
        result_weights: parameters that the model returned as they are, by module and name.
        forms: shapes and types of values.
        tail: why the code after the last of these calls has no plan, if that is so; the last stage runs it as it is.
        is_by_chance: whether the code drew by Python's `random` or numpy, and may take another way with other numbers.
        sharing: units that keep tensors in an object which all of them hold.
        caches: attributes in which parents keep something for their next call, by module and name.
    """

    ops: list[Op] = field(default_factory=list)
    results: tuple[Value, ...] = ()
    written_buffers: tuple[tuple[str, str], ...] = ()
    grad_inputs: tuple[int, ...] = ()
    written_inputs: tuple[int, ...] = ()
    result_weights: tuple[tuple[str, str], ...] = ()
    forms: dict[Value, Form] = field(default_factory=dict)
    caches: tuple[tuple[str, str], ...] = ()
    tail: UncuttableCode | None = None
    is_by_chance: bool = False
    sharing: tuple[frozenset[str], ...] = ()

    @property
    def has_reads(self) -> bool:
        """Whether the code read numbers of the model's inputs, or drew some: with others it may take another way."""
        return self.is_by_chance or any(op.has_read for op in self.ops)

    @property
    def unit_ops(self) -> list[Op]:
        """The calls of units, in order."""
        return [op for op in self.ops if op.kind is Kind.UNIT]

    def needs_grad(self, value: Value) -> bool:
        """Whether a gradient comes back for a value."""
        return value.op == INPUT or value.leaf in self.ops[value.op].grads
