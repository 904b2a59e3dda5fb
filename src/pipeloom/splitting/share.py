"""What of a cut model is in this process: all of it, or the stages of one rank.

Every process makes the whole model and keeps its own stages. Leaving the others where they are would be a trap: they
are never trained, and ``model.state_dict()`` would save them. So their weights go to the meta device, where using
them is an error, and their memory is free; `fill` brings them back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from pipeloom.splitting.split import Split
from pipeloom.splitting.ties import Ties
from pipeloom.splitting.unit import Unit
from pipeloom.standins.absent import give_way, stand_in


class Share:
    """The stages of a model that are in this process.

    Args:
        made: the cut model.
        ties: its tied weights; such a weight belongs to the earliest stage that uses it.
        stages: those that are here.

    Attributes:
        is_whole: whether all are.
        parameter_names: of the whole model, each parameter once.
    """

    def __init__(self, made: Split, ties: Ties, stages: Collection[int]) -> None:
        self._made = made
        self._ties = ties
        self._stages = frozenset(stages)
        self.is_whole = len(self._stages) == made.num_stages
        self.parameter_names = [name for name, _, _ in self._each_once()]
        first: dict[int, int] = {}
        for stage, units in enumerate(made.stages):
            for unit in units:
                for _, tensor in _all_named(unit.module):
                    first.setdefault(id(tensor), stage)
        self._stage_of = {name: first.get(id(tensor), 0) for name, tensor in _all_named(made.root)}
        self._stage_of_unit: dict[str, int] = {}
        for stage, units in enumerate(made.stages):
            for unit in units:
                self._stage_of_unit.setdefault(unit.name, stage)

    def stage_of(self, name: str) -> int:
        """The stage that a parameter or buffer of the whole model belongs to by its name."""
        return self._stage_of[name] if name in self._stage_of else self._stage_around(name)

    def _stage_around(self, name: str) -> int:
        """The stage of the layer that was given a weight after the model was cut: an adapter, or a parametrization."""
        while name and name not in self._stage_of_unit:
            name = name.rpartition(".")[0]
        return self._stage_of_unit.get(name, 0)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are here, each once, in the whole model's order."""
        for name, owner, copy in self._each_once():
            if self.is_whole or self._home(name, copy) in self._stages:
                yield name, owner

    def _each_once(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Names, weights, and what the model has in their places: a copy, where an earlier stage has the weight too."""
        seen: set[int] = set()
        for name, parameter in self._made.root.named_parameters():
            owner = self._ties.owner_of(parameter)
            if id(owner) not in seen:
                seen.add(id(owner))
                yield name, owner, parameter

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers that are here; a tied weight under all its names where its earliest stage is."""
        if self.is_whole:
            return self._made.root.state_dict()
        state = self._made.root.state_dict(keep_vars=True)
        here = {name: value for name, value in state.items() if self._home(name, value) in self._stages}
        return {name: _detached(self._ties.owner_of(value)) for name, value in here.items()}

    def in_order(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same entries in the order that the whole model has them."""
        if self.is_whole:
            return state
        return {name: state[name] for name in self._made.root.state_dict() if name in state}

    def layout(self) -> dict[int, list[str]]:
        """Per stage that is here, the names of its entries in `state_dict`."""
        found: dict[int, list[str]] = {stage: [] for stage in sorted(self._stages)}
        for name, value in self._made.root.state_dict(keep_vars=True).items():
            if (stage := self._home(name, value)) in found:
                found[stage].append(name)
        return found

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> Any:
        """Load what is here from the whole model's state, or from a part of it that has what is here."""
        if self.is_whole:
            return self._made.root.load_state_dict(state, strict=strict)
        everywhere = () if self._made.cut is None else self._made.cut.everywhere
        for unit in everywhere:
            unit.module.load_state_dict(_below(state, _prefix(unit)), strict=False)
        known, own = self._made.root.state_dict().keys(), self.state_dict().keys()
        for stage in self._stages:
            for unit in self._made.stages[stage]:
                unit.module.load_state_dict(_below(state, _prefix(unit)), strict=False)
        missing, unexpected = [name for name in own if name not in state], [name for name in state if name not in known]
        if strict and (missing or unexpected):
            raise RuntimeError(f"missing keys in state_dict: {missing}; unexpected keys: {unexpected}")  # as torch does
        return _IncompatibleKeys(missing, unexpected)

    def release(self) -> None:
        """Put the weights and buffers of the other stages on the meta device."""
        spared = self._ties.weights_of(self._stages) | {id(each) for each in self._buffers_here()}
        made: dict[int, Tensor] = {}
        for unit in self._units_elsewhere():
            _replace(unit.module, lambda _, each: self._released(each, spared, made))
        self._follow(made)
        self._ties.let_go(self._stages)
        if self._made.cut is not None:
            self._made.cut.free(sorted(self._stages))
        stand_in(self._made.root, self._made.num_stages - len(self._stages), self._made.num_stages)

    def contents(self) -> dict[str, Tensor]:
        """All tensors that belong here, also buffers that no state dict holds; a tied weight once."""
        return {
            _prefix(unit) + name: tensor
            for stage in sorted(self._stages)
            for unit in self._made.stages[stage]
            for name, tensor in _all_named(unit.module)
            if not self._ties.is_copy(tensor)
        }

    def fill(self, contents: Mapping[str, Tensor]) -> None:
        """Give the other stages their weights and buffers again."""
        made: dict[int, Tensor] = {}
        for unit in self._units_elsewhere():
            _replace(unit.module, partial(self._filled, contents, made, _prefix(unit)))
        self._follow(made)
        give_way(self._made.root)

    def _follow(self, made: Mapping[int, Tensor]) -> None:
        """Modules around units have what took the place of a weight that they have too (the bias of BERT's head)."""
        for module in self._made.root.modules():
            for name, weight in module._parameters.items():
                if id(weight) in made:
                    module._parameters[name] = made[id(weight)]  # type: ignore[assignment]

    def _buffers_here(self) -> Iterator[Tensor]:
        """Those of a layer that stages share are in the places of all of them."""
        return (b for stage in self._stages for unit in self._made.stages[stage] for b in unit.module.buffers())

    def _units_elsewhere(self) -> Iterator[Unit]:
        return (u for stage, units in enumerate(self._made.stages) if stage not in self._stages for u in units)

    def _released(self, tensor: Tensor, spared: Collection[int], made: dict[int, Tensor]) -> Tensor:
        """What takes a tensor's place: one of no memory for each, and for a tied weight one for all its copies."""
        owner: Tensor = self._ties.owner_of(tensor)
        if id(tensor) in spared:
            return tensor
        if id(owner) in spared:  # tied to a stage that is here, and to this one
            return owner
        if id(owner) not in made:
            empty = torch.empty_like(owner, device="meta")
            is_parameter = isinstance(owner, nn.Parameter)
            made[id(owner)] = nn.Parameter(empty, owner.requires_grad) if is_parameter else empty
            made[-id(owner)] = owner  # an id is of one tensor only while that lives
        return made[id(owner)]

    @staticmethod
    def _filled(contents: Mapping[str, Tensor], made: dict[int, Tensor], prefix: str, name: str, old: Tensor) -> Tensor:
        """What takes the place of a tensor on the meta device; a tied weight that is here gets its latest value."""
        new = contents.get(prefix + name)
        if old.device.type != "meta":
            if new is not None:
                old.detach().copy_(new)
            return old
        if id(old) not in made:
            assert new is not None, "every tensor comes from the rank that it belongs to"
            is_parameter = isinstance(old, nn.Parameter)
            made[id(old)] = nn.Parameter(new.detach(), old.requires_grad) if is_parameter else new
            made[-id(old)] = old
        return made[id(old)]

    def _home(self, name: str, value: Any) -> int:
        owner_stage = self._ties.owner_stage(value)
        return self.stage_of(name) if owner_stage is None else owner_stage


def _below(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The part of a state dict below a module, with the versions that torch keeps beside it."""
    part = OrderedDict((name.removeprefix(prefix), each) for name, each in state.items() if name.startswith(prefix))
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        below = {name: each for name, each in versions.items() if f"{name}.".startswith(prefix)}
        part._metadata = {name.removeprefix(prefix.rstrip(".")).lstrip("."): each for name, each in below.items()}  # type: ignore[attr-defined]
    return part


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _all_named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _replace(module: nn.Module, change: Callable[[str, Tensor], Any]) -> None:
    """Put ``change(name, tensor)`` in the place of every parameter and buffer."""
    for prefix, each in module.named_modules():
        for held in (each._parameters, each._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = change(f"{prefix}.{name}".lstrip("."), tensor)


def _prefix(unit: Unit) -> str:
    return f"{unit.name}." if unit.name else ""
