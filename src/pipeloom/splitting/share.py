"""What of a cut model is in this process: all of it, or the stages of one rank.

Every process makes the whole model and keeps its own stages. Leaving the others where they are would be a trap: they
are never trained, and ``model.state_dict()`` would save them. So their weights go to the meta device, where using
them is an error, and their memory is free; `fill` brings them back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.splitting.split import Split
from pipeloom.splitting.ties import Ties


class Share:
    """The stages of a model that are in this process.

    Args:
        made: the cut model.
        ties: its tied weights; such a weight belongs to the earliest stage that uses it.
        stages: those that are here.
    """

    def __init__(self, made: Split, ties: Ties, stages: Collection[int]) -> None:
        self._made = made
        self._ties = ties
        self._stages = frozenset(stages)
        self.is_whole = len(self._stages) == made.num_stages
        self._stage_of = {unit.name: stage for stage, units in enumerate(made.stages) for unit in units}

    def stage_of(self, name: str) -> int:
        """The stage that a parameter or buffer of the whole model belongs to by its name."""
        return self._stage_of.get(name.partition(".")[0], 0)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are here, each once, in the whole model's order."""
        for name, parameter in self._made.root.named_parameters():
            if self.stage_of(name) in self._stages and not self._ties.is_copy(parameter):
                yield name, parameter

    def parameter_names(self) -> list[str]:
        """The names of all parameters of the whole model, each once."""
        return [name for name, each in self._made.root.named_parameters() if not self._ties.is_copy(each)]

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers that are here; a tied weight under all its names where its earliest stage is."""
        if self.is_whole:
            return self._made.root.state_dict()
        state = self._made.root.state_dict(keep_vars=True)
        return {name: _detached(value) for name, value in state.items() if self._home(name, value) in self._stages}

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
        known, own = self._made.root.state_dict().keys(), self.state_dict().keys()
        result = self._made.root.load_state_dict({name: state[name] for name in own if name in state}, strict=False)
        missing, unexpected = [name for name in own if name not in state], [name for name in state if name not in known]
        if strict and (missing or unexpected):
            raise RuntimeError(f"missing keys in state_dict: {missing}; unexpected keys: {unexpected}")  # as torch does
        return type(result)(missing, unexpected)

    def release(self) -> None:
        """Put the weights and buffers of the other stages on the meta device."""
        spared = self._ties.weights_of(self._stages)
        made: dict[int, Tensor] = {}
        for stage, units in enumerate(self._made.stages):
            if stage not in self._stages:
                for unit in units:
                    _replace(unit.module, lambda _, each: each if id(each) in spared else _on_meta(each, made))

    def contents(self) -> dict[str, Tensor]:
        """All tensors of the stages that are here, also buffers that no state dict holds."""
        return {
            f"{unit.name}.{name}".lstrip("."): tensor
            for stage in sorted(self._stages)
            for unit in self._made.stages[stage]
            for name, tensor in _all_named(unit.module)
        }

    def fill(self, contents: Mapping[str, Tensor]) -> None:
        """Give the other stages their weights and buffers again."""
        made: dict[int, Tensor] = {}
        for stage, units in enumerate(self._made.stages):
            if stage not in self._stages:
                for unit in units:
                    prefix = f"{unit.name}." if unit.name else ""
                    _replace(unit.module, lambda name, old, p=prefix: _filled(old, contents[p + name], made))

    def _home(self, name: str, value: Any) -> int:
        owner_stage = self._ties.owner_stage(value)
        return self.stage_of(name) if owner_stage is None else owner_stage


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _all_named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _replace(module: nn.Module, change: Any) -> None:
    """Put ``change(name, tensor)`` in the place of every parameter and buffer."""
    for prefix, each in module.named_modules(remove_duplicate=True):
        for held in (each._parameters, each._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = change(f"{prefix}.{name}".lstrip("."), tensor)


def _on_meta(tensor: Tensor, made: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in made:
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        made[-id(tensor)] = tensor  # an id is of one tensor only while that lives
    return made[id(tensor)]


def _filled(old: Tensor, new: Tensor, made: dict[int, Tensor]) -> Tensor:
    if old.device.type != "meta":
        return old
    if id(new) not in made:
        is_parameter = isinstance(old, nn.Parameter)
        made[id(new)] = nn.Parameter(new.detach(), old.requires_grad) if is_parameter else new
    return made[id(new)]
