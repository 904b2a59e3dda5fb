"""Which tensor of a dry run is which value: what ops made, wrote into, and where memory is shared.

Ids of tensors stand for them, so all that were seen are kept alive. A write goes to memory, not to one tensor: whatever
overlaps with it has another value from there on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.batch.trees import flatten
from pipeloom.recording.ops import INPUT, Form, Kind, Op, Recording, Same, Target, Value
from pipeloom.standins.glue import exchanged
from pipeloom.standins.placeholder import Placeholder, Unseen, storage_of

_MANY = 1 << 24
"""Elements of memory in which it is not looked for where two views overlap: they are taken to."""


class Values:
    """The tensors of one dry run.

    Args:
        recording: gets the shapes of values, and which need a gradient.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._made: dict[int, Value] = {}
        self._alive: list[Any] = []
        self._aliases: dict[int, list[Tensor]] = {}
        self._shadows: dict[int, Tensor] = {}
        self._shadowed: set[int] = set()
        self.weights: dict[int, tuple[str, str]] = {}
        self._memory: dict[int, tuple[str, str]] | None = None

    def keep(self, *tensors: Any) -> None:
        """Let nothing else have the ids of these."""
        self._alive += tensors

    def note(self, tensor: Tensor, value: Value) -> None:
        """A tensor is a value from here on."""
        self._recording.forms[value] = Form(tuple(tensor.shape), tensor.dtype)
        if id(tensor) not in self._made:
            self.keep(tensor)
            if isinstance(tensor, Placeholder):
                self._aliases.setdefault(storage_of(tensor), []).append(tensor)
        self._made[id(tensor)] = value
        self._note_grad(tensor, value)

    def of(self, tensor: Tensor) -> Value:
        """The value of a placeholder.

        Raises:
            Unseen: nothing is known of it.
        """
        found = self._made.get(id(tensor))
        if found is None:
            raise Unseen(
                f"{tensor!r} left the unit that made it otherwise than by return (in a list, a dict, an object), and "
                "no other stage could be given it"
            )
        self._note_grad(tensor, found)
        return found

    def _note_grad(self, tensor: Tensor, value: Value) -> None:
        """Looked at again at each use: a custom autograd.Function makes its outputs need one when it is over."""
        if value.op != INPUT and tensor.requires_grad:
            self._recording.ops[value.op].grads.add(value.leaf)

    def is_known(self, tensor: Tensor) -> bool:
        """Whether it is a value."""
        return id(tensor) in self._made

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or a buffer that one stage has."""
        return id(tensor) in self.weights

    def is_of_model(self, tensor: Tensor) -> bool:
        """Whether it is a value or a weight."""
        return self.is_known(tensor) or self.is_weight(tensor)

    def are_of_weights(self, given: list[Tensor], variable: Collection[int]) -> bool:
        """Whether a call that is given these uses weights alone; ``variable`` are the ids of what depends on inputs."""
        return all(
            self.is_of_weights(each) if isinstance(each, Placeholder) else id(each) not in variable for each in given
        )

    def is_of_weights(self, tensor: Tensor) -> bool:
        """Whether a placeholder is a weight, or was made of weights alone."""
        made = self._made.get(id(tensor))
        is_made = made is not None and made.op != INPUT and self._recording.ops[made.op].is_of_weights
        return is_made or self.is_weight(tensor)

    def weight_at(self, memory: int) -> tuple[str, str]:
        """The weight that lies in some memory, by module and name."""
        if self._memory is None:
            self._memory = {
                storage_of(each): self.weights[id(each)] for each in self._alive if id(each) in self.weights
            }
        return self._memory.get(memory, ("", ""))

    def inputs(self, given: list[Tensor]) -> list[Value]:
        """The values among a call's tensors."""
        return [self.of(each) for each in given if isinstance(each, Placeholder) and not self.is_weight(each)]

    def weights_among(self, given: list[Tensor]) -> tuple[tuple[str, str], ...]:
        """The weights among a call's tensors, by module and name."""
        return tuple(self.weights[id(each)] for each in given if id(each) in self.weights)

    # Real tensors that a placeholder was written into are placeholders from there on (contract 22).

    def shadowed(self, value: Any) -> Any:
        """Arguments with placeholders for such tensors.

        Raises:
            Unseen: one is another view of such memory, made before the write.
        """
        return exchanged(value, self._shadow_of) if self._shadows else value

    def shadow(self, tensor: Tensor) -> Tensor:
        """What stands for a leaf of the model's output."""
        return self._shadow_of(tensor) if self._shadows else tensor

    def _shadow_of(self, tensor: Tensor) -> Tensor:
        found = self._shadows.get(id(tensor), tensor)
        if found is tensor and not isinstance(tensor, Placeholder) and storage_of(tensor) in self._shadowed:
            raise Unseen("a view of a tensor is used that a value of a stage was written into by another view")
        return found

    def write_into(self, op: Op, given: list[Tensor], written: set[int]) -> list[tuple[Tensor, Target]]:
        """The placeholders for real tensors that an op wrote a placeholder into, and where a stage finds those."""
        found = []
        for position, each in enumerate(given):
            if isinstance(each, Placeholder) or storage_of(each) not in written:
                continue
            base = each._base if each._is_view() else None
            if base is not None and id(base) not in self._shadows:
                found.append((self._shadow(base), Target(position, is_base=True)))
            if id(each) not in self._shadows:
                whole = None if base is None else self._shadows[id(base)]
                found.append((self._shadow(each, whole), Target(position, is_base=False)))
            op.kind = Kind.GLUE if op.kind is Kind.EVERYWHERE else op.kind
        return found

    def _shadow(self, tensor: Tensor, base: Tensor | None = None) -> Tensor:
        made: Tensor = Placeholder.like(tensor)
        if base is not None:
            made = base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        self._shadows[id(tensor)] = made
        self.keep(tensor)
        self._shadowed.add(storage_of(tensor))
        return made

    # What ops make.

    def close(self, op: Op, given: list[Tensor], out: Any, written: set[int], used: Sequence[Tensor] = ()) -> None:
        """Note what an op returned and wrote into; its inputs are those of ``given`` and of ``used``."""
        op.inputs = tuple(dict.fromkeys(self.inputs([*given, *used])))
        leaves, op.structure = flatten(out)
        for leaf in leaves:
            self.add(op, given, leaf)
        op.num_returned = len(op.outputs)
        for shadow, target in self.write_into(op, given, written):
            op.targets[len(op.outputs)] = target
            self._append(op, shadow)
        done = {id(leaf) for leaf in leaves} | {id(each) for each in op.outputs}
        for position, tensor in enumerate(given):
            if isinstance(tensor, Placeholder) and storage_of(tensor) in written:
                if id(tensor) not in done and not self.is_weight(tensor):
                    done.add(id(tensor))
                    self.note(tensor, Value(op.index, len(op.outputs)))
                    op.outputs.append(Same(position))
                self._through(op, tensor, done | {id(each) for each in given}, written)

    def _through(self, op: Op, tensor: Tensor, done: set[int], written: set[int]) -> None:
        """Other tensors on the memory that was written are other values from here on."""
        for alias in self._aliases.get(storage_of(tensor), ()):
            if id(alias) not in done and _overlap(alias, tensor) and storage_of(alias) in written:
                op.holders[len(op.outputs)] = self.of(alias)
                self._append(op, alias)
                done.add(id(alias))

    def forget_dead(self) -> None:
        """Forget of memory that was written into what nothing uses after that."""
        used = set(self._recording.results)
        for op in reversed(self._recording.ops):
            op.holders = {leaf: value for leaf, value in op.holders.items() if Value(op.index, leaf) in used}
            used.update(op.uses)

    def add(self, op: Op, given: list[Tensor], leaf: Any) -> None:
        """One more output of an op."""
        position = next((i for i, each in enumerate(given) if each is leaf), None) if isinstance(leaf, Tensor) else None
        if position is None:
            if isinstance(leaf, Placeholder) and not self.is_weight(leaf):
                self._append(op, leaf)
            else:
                op.outputs.append(leaf)
            return
        if isinstance(leaf, Placeholder) and not self.is_weight(leaf):
            self.note(leaf, Value(op.index, len(op.outputs)))
        op.outputs.append(Same(position))

    def _append(self, op: Op, tensor: Tensor) -> None:
        self.note(tensor, Value(op.index, len(op.outputs)))
        op.outputs.append(tensor)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two placeholders on the same memory share an element."""
    metas = [each.meta for each in (one, other) if isinstance(each, Placeholder)]
    if len({(each.dtype, each.layout) for each in metas}) != 1 or metas[0].layout is not torch.strided:
        return True
    num_elements = metas[0].untyped_storage().nbytes() // metas[0].element_size()
    if num_elements > _MANY:
        return True
    is_used = torch.zeros(num_elements, dtype=torch.bool)
    first, second = (is_used.as_strided(each.shape, each.stride(), each.storage_offset()) for each in metas)
    first.fill_(True)
    return bool(second.any())
