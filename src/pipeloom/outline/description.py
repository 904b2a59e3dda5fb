"""`pipeloom.split`: say how a model would be cut, without making a pipeline of it.

One that only wants to know where the cuts are, and what crosses them, should need neither the weights nor the devices.
So parameters stay on the meta device where a factory is given, the model runs without numbers, and what comes back
holds names and figures only.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.containers import leaves
from pipeloom.batch.trees import Structure
from pipeloom.errors import SplitError
from pipeloom.outline.outline import (
    CrossingValue,
    GlueCall,
    Outline,
    SharedParameter,
    StageOutline,
    UnitCall,
)
from pipeloom.recording.dry_run import DryRun
from pipeloom.recording.ops import INPUT, Kind, Op, Recording, Value
from pipeloom.splitting.choose import count
from pipeloom.splitting.cut import Cut, Inputs
from pipeloom.splitting.cuts import Cuts, asked
from pipeloom.splitting.split import Split, check_count, needs_inputs
from pipeloom.splitting.split import split as split_model
from pipeloom.splitting.unit import Unit
from pipeloom.weights.build import build

Model = nn.Module | Sequence[nn.Module]


def split(
    model_or_factory: Model | Callable[[], nn.Module],
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    num_stages: int | None = None,
    cuts: Cuts | None = None,
) -> Outline:
    """Say how a model is cut into stages, as `Pipeline` cuts it; nothing is allocated, and no numbers are computed.

    Args:
        model_or_factory: a module, or a list with one module per stage; it stays as it is. Or a callable without
            arguments that makes a module: its parameters are never made, so it may be larger than the memory.
        example_args: inputs of one micro-batch; only their shapes and types matter. An `nn.Sequential`, or a list, can
            be cut without.
        example_kwargs: likewise.
        num_stages: how many stages, balanced by parameters and FLOPs.
        cuts: indices of calls of units, names of modules, or sizes, as those of `Pipeline`.

    Returns:
        The units in call order, glue, stages, and what crosses between them: ``print`` it, or see
        `pipeloom.outline.outline.Outline`.

    Raises:
        SplitError: the model cannot be cut so, or has to be run and no inputs were given.
    """
    check_count(num_stages)
    cuts = asked(cuts)
    model = _model_of(model_or_factory)
    has_inputs = bool(example_args) or example_kwargs is not None
    inputs = (tuple(example_args), dict(example_kwargs or {})) if has_inputs else None
    with torch.enable_grad():
        made = _cut(model, inputs, num_stages, cuts)
        return _ran(made, made.cut) if made.cut is not None else _chained(made, inputs)


def _model_of(given: Any) -> Model:
    if isinstance(given, nn.Module | list | tuple):
        return given
    if not callable(given):
        raise SplitError(
            f"{type(given).__name__} {given!r} was given; a module, a list with one module per stage, or a callable "
            "that makes a module is needed"
        )
    return build(given)


def _cut(model: Model, inputs: Inputs | None, num_stages: int | None, cuts: Cuts | None) -> Split:
    is_one = inputs is not None and not cuts  # one stage of a module: it is run for its figures all the same
    if isinstance(model, nn.Module) and needs_inputs(model, 2 if is_one else num_stages, cuts):
        if inputs is None:
            raise SplitError(
                f"a {type(model).__name__} is cut by running it, and no inputs were given",
                "pass example_args= or example_kwargs=; only their shapes and types matter",
            )
        cut = Cut(model, inputs, num_stages, cuts)
        return Split(model, cut.stages, cut)
    return split_model(model, num_stages=num_stages, cuts=cuts)


# A model that was cut by running it.


def _ran(made: Split, cut: Cut) -> Outline:
    recording, flow = cut.first, cut.plan_of_first.flow
    flops = [0] * made.num_stages
    calls: list[list[str]] = [[] for _ in made.stages]
    glue, units = [], []
    for op, stage in zip(recording.ops, flow.stage_of, strict=True):
        flops[stage or 0] += op.num_flops
        if op.kind is Kind.UNIT:
            calls[stage or 0].append(op.what)
            units.append(_unit(op.what, cut.root.get_submodule(op.what), op.call, stage or 0, op.num_flops))
        else:
            glue.append(GlueCall(op.what, op.module, stage, op.num_flops))
    values = list(_values(recording, cut))
    figures = _Figures(made, tuple(units), tuple(map(tuple, calls)), tuple(glue), tuple(values), tuple(flops))
    return figures.outline()


def _unit(name: str, module: nn.Module, call: int, stage: int, num_flops: int | None) -> UnitCall:
    return UnitCall(name, type(module).__name__, call, stage, count(module), num_flops)


def _values(recording: Recording, cut: Cut) -> Iterator[CrossingValue]:
    """What crosses, each value once."""
    flow = cut.plan_of_first.flow
    to: defaultdict[tuple[Value, int], list[int]] = defaultdict(list)
    for stage, each in enumerate(flow.stages):
        for other, values in each.sends.items():
            for value in values:
                to[value, stage].append(other)
    num_calls = Counter(op.what for op in recording.unit_ops)
    for (value, stage), stages in sorted(to.items()):
        form = recording.forms[value]
        label = _label(recording, value, num_calls, type(cut.root).__name__)
        yield _crossing(label, stage, stages, form.shape, form.dtype, needs_grad=recording.needs_grad(value))


def _crossing(
    label: str, stage: int, stages: Iterable[int], shape: Sequence[int], dtype: torch.dtype, *, needs_grad: bool
) -> CrossingValue:
    num_bytes = math.prod(shape) * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return CrossingValue(label, stage, tuple(sorted(stages)), tuple(shape), name, num_bytes, needs_grad)


def _label(recording: Recording, value: Value, num_calls: Mapping[str, int], model: str) -> str:
    """Who made a value: ``encoder``, ``encoder[1]``, ``layer (call 2)['mask']``, ``add in model.decoder``."""
    if value.op == INPUT:
        return f"input {value.leaf}"
    op = recording.ops[value.op]
    name = f"{op.what} in {op.module or model}" if op.kind is not Kind.UNIT else op.what
    if num_calls[op.what] > 1 and op.kind is Kind.UNIT:
        name += f" (call {op.call + 1})"
    return name + _path(op, value.leaf)


def _path(op: Op, leaf: int) -> str:
    if leaf >= op.num_returned:
        return " (written into)"
    paths = list(_paths(op.structure)) if op.structure is not None else []
    return paths[leaf] if leaf < len(paths) else ""


def _paths(structure: Structure) -> Iterator[str]:
    if structure.container is None:
        yield ""
        return
    for name, child in zip(structure.container.children, structure.children, strict=True):
        for path in _paths(child):
            yield name + path


# A chain: an nn.Sequential, a list of stages, or a module that is one stage.


@dataclass
class _Seen:
    """What the units of a chain returned."""

    outputs: list[Any] = field(default_factory=list)


class _Chain(nn.Module):
    """The units, one after another, as a pipeline calls them."""

    def __init__(self, units: Sequence[Unit], seen: _Seen) -> None:
        super().__init__()
        self.units = nn.ModuleList(unit.module for unit in units)
        self.signatures = tuple(unit.signature for unit in units)
        self.seen = seen

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run them; the first one takes what the model takes."""
        value: Any = None
        for index, (module, signature) in enumerate(zip(self.units, self.signatures, strict=True)):
            if index == 0:
                value = module(*args, **kwargs)
            else:
                value = module(value) if signature is None else signature.called(module, value)
            self.seen.outputs.append(value)
        return value


def _chained(made: Split, inputs: Inputs | None) -> Outline:
    stages = [stage for stage, units in enumerate(made.stages) for _ in units]
    flops, outputs = _survey(made.units, inputs) if inputs is not None else (None, None)
    names = Counter[str]()
    units = []
    for index, (unit, stage) in enumerate(zip(made.units, stages, strict=True)):
        units.append(_unit(unit.name, unit.module, names[unit.name], stage, None if flops is None else flops[index]))
        names[unit.name] += 1
    calls = tuple(tuple(unit.name for unit in units) for units in made.stages)
    values = None if outputs is None else tuple(_handed_on(made.units, stages, outputs))
    return _Figures(made, tuple(units), calls, (), values, None if flops is None else _summed(flops, stages)).outline()


def _summed(flops: Sequence[int], stages: Sequence[int]) -> tuple[int, ...]:
    """Per stage, the FLOPs of its units."""
    sums: defaultdict[int, int] = defaultdict(int)
    for num_flops, stage in zip(flops, stages, strict=True):
        sums[stage] += num_flops
    return tuple(sums[stage] for stage in range(max(stages) + 1))


def _survey(units: Sequence[Unit], inputs: Inputs) -> tuple[list[int], list[Any]]:
    """Per unit its FLOPs, and what it returned."""
    seen = _Seen()
    run = DryRun(_Chain(units, seen), None, set())
    run.run(*inputs)
    return [node.num_flops for node in run.tree.children], seen.outputs


def _handed_on(units: Sequence[Unit], stages: Sequence[int], outputs: Sequence[Any]) -> Iterator[CrossingValue]:
    """A stage of a chain gets all that the one before it returned."""
    for index in range(len(units) - 1):
        if stages[index] != stages[index + 1]:
            for path, leaf in leaves(units[index].name, outputs[index]):
                if isinstance(leaf, Tensor):
                    to = [stages[index + 1]]
                    yield _crossing(path, stages[index], to, leaf.shape, leaf.dtype, needs_grad=leaf.requires_grad)


# Figures of both.


@dataclass(frozen=True)
class _Figures:
    """What is known of a model, cut."""

    made: Split
    units: tuple[UnitCall, ...]
    calls: tuple[tuple[str, ...], ...]
    glue: tuple[GlueCall, ...]
    values: tuple[CrossingValue, ...] | None
    flops: tuple[int, ...] | None

    def outline(self) -> Outline:
        root = self.made.root
        parameters, buffers = [*root.parameters()], [*root.buffers()]
        in_stages = {id(each) for units in self.made.stages for each in _held(units)[1]}
        return Outline(
            model="list" if isinstance(root, nn.ModuleList) else type(root).__name__,
            units=self.units,
            glue=self.glue,
            stages=tuple(self._stage(stage) for stage in range(self.made.num_stages)),
            values=self.values,
            shared=tuple(self._shared()),
            num_parameters=_elements(parameters),
            parameter_bytes=_bytes(parameters),
            num_buffers=_elements(buffers),
            buffer_bytes=_bytes(buffers),
            everywhere_buffer_bytes=_bytes(each for each in buffers if id(each) not in in_stages),
            num_flops=None if self.flops is None else sum(self.flops),
        )

    def _stage(self, stage: int) -> StageOutline:
        units = self.made.stages[stage]
        parameters, buffers = _held(units)
        known = {unit.name for unit in self.units}
        extra = [f"{unit.name}.{name}" for unit in units if unit.name not in known
                 for name, _ in unit.module.named_parameters()]  # fmt: skip
        return StageOutline(
            stage=stage,
            units=self.calls[stage],
            glue_parameters=tuple(name.lstrip(".") for name in extra),
            num_parameters=_elements(parameters),
            parameter_bytes=_bytes(parameters),
            num_buffers=_elements(buffers),
            buffer_bytes=_bytes(buffers),
            num_flops=None if self.flops is None else self.flops[stage],
            receives=self._traffic(lambda start, end: start if end == stage else None),
            sends=self._traffic(lambda start, end: end if start == stage else None),
        )

    def _traffic(self, other_of: Callable[[int, int], int | None]) -> tuple[tuple[int, int], ...] | None:
        """Bytes per other stage: of the ways of values, from a stage to one, that ``other_of`` says one for."""
        if self.values is None:
            return None
        found: defaultdict[int, int] = defaultdict(int)
        for value in self.values:
            for to in value.to_stages:
                other = other_of(value.from_stage, to)
                if other is not None:
                    found[other] += value.num_bytes
        return tuple(sorted(found.items()))

    def _shared(self) -> Iterator[SharedParameter]:
        names: defaultdict[int, list[str]] = defaultdict(list)
        holders: defaultdict[int, set[int]] = defaultdict(set)
        found: dict[int, nn.Parameter] = {}
        for name, parameter in self.made.root.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
            found[id(parameter)] = parameter
        for stage, units in enumerate(self.made.stages):
            for parameter in _held(units)[0]:
                holders[id(parameter)].add(stage)
        for key, parameter in found.items():
            if len(names[key]) > 1 or len(holders[key]) > 1:
                stages = tuple(sorted(holders[key]))
                yield SharedParameter(tuple(names[key]), stages, parameter.numel(), _bytes([parameter]))


def _held(units: Iterable[Unit]) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The parameters and buffers of a stage, each once."""
    parameters = {id(each): each for unit in units for each in unit.module.parameters()}
    buffers = {id(each): each for unit in units for each in unit.module.buffers()}
    return [*parameters.values()], [*buffers.values()]


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() for each in tensors)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.dtype.itemsize for each in tensors)
