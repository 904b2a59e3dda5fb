"""One stage's part of a forward: the model's own code runs, in which only this stage's units are real.

Calls of other stages return what the dry run saw, or the value that came from there. No shape function is called, and
nothing is looked at inside units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.trees import LEAF, flatten, unflatten
from pipeloom.errors import UncuttableCode
from pipeloom.recording import plain
from pipeloom.recording.ops import INPUT, Op, Recording, Same, Value
from pipeloom.recording.plainly import Draws
from pipeloom.recording.raised import again
from pipeloom.recording.refusals import came_otherwise
from pipeloom.splitting.dataflow import Flow
from pipeloom.splitting.forms import is_as_recorded
from pipeloom.standins.checkpoints import checkpointed
from pipeloom.standins.clone import Call
from pipeloom.standins.glue import DRAWS, Seen, exchanged, read, tensors_in, unseen
from pipeloom.standins.opaque import swapping
from pipeloom.standins.placeholder import NoNumbers, Placeholder
from pipeloom.standins.spec import form


class StageDone(BaseException):
    """A stage's part of the model's code is over."""


class OtherWay(Exception):
    """The model's code took another way than the recording has."""


class Replay:
    """One forward of one stage.

    Args:
        recording: the plan.
        flow: what crosses.
        stage: which; None answers every call from the recording, to see whether the code takes the recorded way.
        received: values of other stages.
        draws: put around units, and around glue that draws random numbers.
        device: where the stage is, if that is said; placeholders report it.
    """

    def __init__(
        self,
        recording: Recording,
        flow: Flow,
        stage: int | None,
        received: Mapping[Value, Tensor],
        draws: Draws,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self._ops = recording.ops
        self._stage_of = flow.stage_of
        self._stage = stage
        self._last = len(flow.stages) - 1
        self._is_last = stage == self._last
        self._end = len(recording.ops) if stage is None or self._is_last else flow.stages[stage].end
        self._received = received
        self._draws = draws
        self._next = 0
        self._current: dict[int, Tensor] = {}
        self._alive: list[Any] = []
        self._held: dict[Value, Tensor] = {}
        self._kept: dict[Value, Any] = dict(received)
        self._keeps = {} if stage is None else flow.stages[stage].keeps
        self._received_ops = {value.op for value in received}
        self._tail = recording.tail
        self._num_unplanned: Counter[str] = Counter()
        self._results = frozenset(recording.results)
        # By chance the same calls may be given other values: seen only where all of them are placeholders.
        self._value_of: dict[int, Value] | None = {} if stage is None and recording.is_by_chance else None
        self.mode = Seen(self._glue, is_stage=True)

    def run(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model; None where this is not the last stage."""
        if self._stage == 0:
            leaves = flatten((args, kwargs))[0]
            self._kept.update({Value(INPUT, i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})
        try:
            with self.mode:
                out = root(*args, **kwargs)
        except StageDone:
            return None
        finally:
            del self.mode  # it leads back here: all values would live until the garbage collector comes by
        if self._stage is None:
            if self._next < self._end:
                raise OtherWay(f"{self._ops[self._next].what} was recorded, and the code was over")
            self._check_given("the model's output", self._results, flatten(out)[0])
            return None
        if not self._is_last and self._end == len(self._ops):
            return None  # later stages have no call this time
        if not self._is_last:
            raise OtherWay("the model's code caught the end of a stage; a bare `except:` does that")
        leaves, structure = flatten(out)
        return unflatten([self._swapped(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)

    def value(self, value: Value) -> Any:
        """A value that this stage made, or that came to it."""
        return self._kept[value]

    def fire(self, name: str, is_before: bool, hook: Any, module: nn.Module, given: tuple[Any, ...]) -> Any:
        """Call a hook of a parent if it belongs to this stage: that of the parent's first unit, or of its last."""
        within = [self._stage_of[op.index] for op in self._ops if op.what.startswith(f"{name}.")] if name else []
        stages = [stage for stage in within if stage is not None] or [0, self._last]
        if (min(stages) if is_before else max(stages)) != self._stage:
            return None
        leaves, structure = flatten(given)
        seen = unflatten([self._current.get(id(leaf), leaf) for leaf in leaves], structure)
        with unseen(self.mode):
            return hook(module, *seen)

    def unit(self, name: str, module: Any, run: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the call of a unit; ``module`` is the real one, ``run`` runs a clone's code."""
        op = self._op(name)
        if op is None:
            return self._unplanned_unit(name, module, run, self._real((args, kwargs)))
        stage = self._stage_of[op.index]
        if stage is None:
            with unseen(self.mode), self._draws(name, op.call):
                out = run(*args, **kwargs)
            self._check_read(op, out)
            return out
        if stage != self._stage:
            if self._value_of is not None and op.asked != self._asked(op, args, kwargs):
                raise OtherWay(f"{name} was given other values than were recorded")
            return self._foreign(op, (args, kwargs))
        code_has = args, kwargs
        args, kwargs = self._real(code_has)
        for place in op.given:
            self._give(*place)
        called = checkpointed(self.mode, module) if self.mode.checkpoints and not _may_write(op) else module
        try:
            with unseen(self.mode), self._draws(name, op.call):
                out = called(*args, **kwargs)
        except NoNumbers as error:
            raise came_otherwise(name, error) from error
        for each in op.filled:
            each.copy((args, kwargs), code_has)
        for module, key in op.left:
            vars(self.modules[module])[key] = vars(self.originals[module]).get(key)
        if not self._is_last:
            plain.check(op, out)
        self._keep(op, (args, kwargs), out)
        return out

    def _glue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = self._op(func)
        if op is None:
            with self._unplanned(_name(func), func):
                return swapping(func, self._swapped)(*_swap_all(self, args), **_swap_all(self, kwargs))
        stage = self._stage_of[op.index]
        if stage is not None and stage != self._stage:
            if self._stage is None and (op.has_read or self._value_of is not None):
                draws = self._draws(op.draw_name, op.call) if op.has_draws else nullcontext()
                if not is_as_recorded(op, func, args, kwargs, draws):
                    raise OtherWay(f"{op.what} gave a tensor of another shape or type than was recorded")
            return self._foreign(op, (args, kwargs))
        if stage is not None or self._current:
            args, kwargs = _swap_all(self, args), _swap_all(self, kwargs)
        run = func if stage is None else swapping(func, self._swapped)
        if op.has_draws:
            with self._draws(op.draw_name, op.call):
                out = run(*args, **kwargs)
        else:
            out = run(*args, **kwargs)
        if stage is not None:
            self._keep(op, (args, kwargs), out)
        elif op.has_read:
            self._check_read(op, out)
        return out

    def _op(self, called: Any) -> Op | None:
        """The next op of the plan, which must be this call; None where the plan is over and the code goes on."""
        if self._next >= self._end:
            if self._end < len(self._ops) or (self._tail is not None and not self._is_last):
                raise StageDone
            if self._tail is not None:
                return None
            raise OtherWay(f"{_name(called)} was called after the last call of the recording")
        op = self._ops[self._next]
        self._next += 1
        is_same = op.what == called if op.func is None else (op.func is called or op.func == called)
        if not is_same:
            raise OtherWay(f"{_name(called)} was called where {op.what} was recorded")
        if op.raised is not None:
            raise again(op.raised)
        return op

    def _unplanned_unit(self, name: str, module: Any, run: Call, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        if module is run:  # not one of this stage's
            raise OtherWay(f"{name} of an earlier stage was called again, after this: {self._tail}")
        with unseen(self.mode), self._unplanned(name):
            return module(*given[0], **given[1])

    def _unplanned(self, name: str, func: Any = None) -> AbstractContextManager[Any]:
        """Put this around a call that the plan does not have: it may draw."""
        if func is not None and name not in DRAWS:
            return nullcontext()
        name = f"after the plan: {name}"
        self._num_unplanned[name] += 1
        return self._draws(name, self._num_unplanned[name] - 1)

    def _check_read(self, op: Op, out: Any) -> None:
        if op.has_read and read(out) != op.read:
            raise OtherWay(f"{op.what} gave {read(out)}; {op.read} was recorded")

    def _foreign(self, op: Op, given: Any) -> Any:
        """What a call of another stage returns: placeholders, and the values that this stage received."""
        for (module, key), left in op.left.items():
            vars(self.modules[module])[key] = left
        if self._value_of is not None:
            self._check_given(op.what, op.uses, _tensors(op, given))
        elif op.structure is LEAF and op.index not in self._received_ops and _is_one_value(op):
            return self._here(op.outputs[0])
        tensors: list[Tensor] | None = None
        leaves = []
        for leaf, output in enumerate(op.outputs):
            if type(output) is Same or leaf in op.targets:
                tensors = _tensors(op, given) if tensors is None else tensors
                output = tensors[output.position] if type(output) is Same else op.targets[leaf].among(tensors)
            else:
                output = self._here(output)
            value = self._received.get(Value(op.index, leaf)) if self._received else None
            if value is not None and value is not output:
                if isinstance(output, Tensor):
                    self._current[id(output)] = value
                    self._alive.append(output)
                output = value
                self._follow(op, leaf, value)
            if self._value_of is not None and isinstance(output, Placeholder):
                self._value_of[id(output)] = Value(op.index, leaf)
                self._alive.append(output)
            leaves.append(output)
        for target, path, leaf in op.effects:
            self._effect(target, path, leaves[leaf])
        for each in op.filled:
            each.put(given, leaves)
        assert op.structure is not None, "every op of a recording has returned"
        return unflatten(leaves[: op.num_returned], op.structure)

    def _check_given(self, what: str, recorded: Collection[Value], given: list[Any]) -> None:
        found = {} if self._value_of is None else self._value_of
        others = [found[id(each)] for each in given if id(each) in found and found[id(each)] not in recorded]
        if others:
            raise OtherWay(f"{what} was given {others[0]}, which was not recorded")

    def _here(self, output: Any) -> Any:
        """A placeholder that says it is where this stage is."""
        return output.at(self._device) if self._device is not None and isinstance(output, Placeholder) else output

    def _follow(self, op: Op, leaf: int, value: Tensor) -> None:
        """The code may hold, of memory that was written into, the tensor that came from there before."""
        if leaf in op.holders:
            before = op.holders[leaf]
            held = self._held[Value(op.index, leaf)] = self._held.get(before, self._received.get(before, value))
            self._current[id(held)] = value
            self._alive.append(held)

    def _effect(self, target: Any, path: tuple[Any, ...], value: Any) -> None:
        if isinstance(target, str):
            setattr(self.modules[target], path[0], value)
            return
        held = target.get()
        for key in path:
            held = held[key]
        held.append(value)

    modules: Mapping[str, nn.Module] = {}
    originals: Mapping[str, nn.Module] = {}

    def _give(self, module: str, key: str) -> None:
        """Set on a unit what the code of its parents has set on its stand-in."""
        here = vars(self.modules[module])
        if key in here:
            vars(self.originals[module])[key] = self._real(here[key])

    def _asked(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return form((args, kwargs, [vars(self.modules[module]).get(key) for module, key in op.given]))

    def _keep(self, op: Op, given: Any, out: Any) -> None:
        """Remember what goes to other stages."""
        for target, path, _ in op.effects:
            if isinstance(target, str):
                setattr(self.modules[target], path[0], getattr(self.originals[target], path[0]))
        leaves = self._keeps.get(op.index)
        if leaves:
            returned = flatten(out)[0]
            for leaf in leaves:
                made = returned[leaf] if leaf < op.num_returned else self._written(op, leaf, given)
                self._kept[Value(op.index, leaf)] = made

    def _written(self, op: Op, leaf: int, given: Any) -> Any:
        """What an op did not return, but wrote into or left elsewhere."""
        if leaf in op.holders:
            return self._kept[op.holders[leaf]]
        output = op.outputs[leaf]
        if type(output) is Same:
            return _tensors(op, given)[output.position]
        if leaf in op.targets:
            return op.targets[leaf].among(_tensors(op, given))
        filled = next((each for each in op.filled if leaf in each.leaves), None)
        if filled is not None:
            return filled.leaf(given, leaf)
        effect = next(each for each in op.effects if each.leaf == leaf)
        if isinstance(effect.target, str):
            return getattr(self.originals[effect.target], effect.path[0])
        held = effect.target.get()
        for key in effect.path:
            held = held[key]
        same = [each.leaf for each in op.effects if (each.target, each.path) == (effect.target, effect.path)]
        return held[same.index(leaf) - len(same)]

    def _real(self, given: Any) -> Any:
        """Arguments of a unit of this stage, none of them a placeholder."""
        if self._is_real(given):
            return given
        leaves, structure = flatten(given)
        new = [self._swapped(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if all(a is b for a, b in zip(leaves, new, strict=True)):
            return given
        return unflatten(new, structure)

    def _is_real(self, given: Any) -> bool:
        """Whether nothing in it is to be swapped; False also for what only `flatten` can open."""
        kind = type(given)
        if kind is Tensor:
            return id(given) not in self._current
        if kind is tuple or kind is list:
            return all([self._is_real(each) for each in given])
        if kind is dict:
            return all([self._is_real(each) for each in given.values()])
        return given is None or kind in _PLAIN

    def _swapped(self, tensor: Tensor) -> Tensor:
        found = self._current.get(id(tensor), tensor) if self._current else tensor
        if isinstance(found, Placeholder):
            raise OtherWay(f"{found!r} of another stage did not come to stage {self._stage}")
        return found


_PLAIN = frozenset({bool, int, float, str})


def _is_one_value(op: Op) -> bool:
    return len(op.outputs) == 1 and type(op.outputs[0]) is not Same and not (op.targets or op.effects or op.filled)


def _may_write(op: Op) -> bool:
    """Whether a unit may write into what it is given, which a second forward of it would find written."""
    return bool(op.targets) or any(type(each) is Same for each in op.outputs)


def _swap_all(replay: Replay, given: Any) -> Any:
    return exchanged(given, replay._swapped) if given else given


def _tensors(op: Op, given: Any) -> list[Tensor]:
    if op.func is not None:
        return tensors_in(given, [])
    return [leaf for leaf in flatten(given)[0] if isinstance(leaf, Tensor)]


def _name(called: Any) -> str:
    return called if isinstance(called, str) else getattr(called, "__name__", str(called))


def other_way(error: OtherWay) -> UncuttableCode:
    """What a user is told of it."""
    return UncuttableCode(
        f"the model's code took another way than in its dry run: {error}",
        "let the way depend on the model's inputs and its mode only, or cut elsewhere",
    )
