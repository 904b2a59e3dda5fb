"""What one stage runs: parents of its own, with stand-ins where units are.

A parent's parameters and buffers are shared by the stages that read them. Which stage trains a parameter that glue uses
is said by a *shell*: a module that holds just those, and writes through to where the stage's code finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.copies import copied_alike
from pipeloom.batch.stands_for import STANDS_FOR
from pipeloom.batch.trees import flatten, unflatten
from pipeloom.chance import AROUND
from pipeloom.recording.ops import INPUT, Recording, Value
from pipeloom.recording.plainly import Draws
from pipeloom.splitting.dataflow import Flow
from pipeloom.splitting.handed import Handed
from pipeloom.splitting.hooks import fire_added, has_any_hooks, hooks_of, put_hooks
from pipeloom.splitting.replay import Replay
from pipeloom.standins.clone import Call, Clones, plain_values
from pipeloom.standins.placeholder import Placeholder


class Tree:
    """The parents of one stage.

    Args:
        root: the model.
        units: names of all units.
        runs: the modules that this stage runs, by the unit's name.
        written: buffers of parents that everybody's glue writes into, by module and name.
        is_first: whether this is stage 0, which writes into the model's own buffers.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Collection[str],
        runs: Mapping[str, nn.Module],
        written: Iterable[tuple[str, str]] = (),
        *,
        is_first: bool = True,
    ) -> None:
        self.runs = dict(runs)
        self._units = frozenset(units)
        self._active: Replay | None = None
        self.clones = Clones(root, lambda name, _: name in self._units, self._answer)
        self._inside = {name: self._below(name) for name in self.runs}
        self._handed = {name: Handed() for name in self.runs}
        for name in self.runs:
            self._share(name)
        self._then: dict[str, dict[str, Any]] = {}
        self._written = frozenset(written)
        self._is_first = is_first
        self._device: torch.device | None = None
        self._parents = [name for name in self.clones.of if not self._is_inside_a_unit(name)]
        self._known = {name: hooks_of(self.clones.of[name]) for name in self._units if name not in self.runs}
        self._hooks: dict[str, set[int]] = {name: set() for name in self._parents}
        self.refresh()

    def write_through(self) -> None:
        """Write into the model's own buffers: one stage of each process does."""
        self._is_first = True
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Before a step: parents have the model's hooks and buffers, and copies of those that every stage writes."""
        for name in self._parents:
            put_hooks(name, self.clones.originals[name], self.clones.of[name], self._fire, self._hooks[name])
            original, here = self.clones.originals[name]._buffers, self.clones.of[name]._buffers
            for key, buffer in original.items():
                is_written = (name, key) in self._written
                if buffer is not None and self._device not in (None, buffer.device):
                    buffer = buffer.to(self._device)
                    if is_written and self._is_first:
                        original[key] = buffer
                has_copy = buffer is not None and is_written and not self._is_first
                here[key] = buffer.detach().clone() if has_copy and buffer is not None else buffer

    def place(self, device: torch.device, own: Iterable[nn.Parameter]) -> None:
        """Let the parents' code see a model that is on a device; ``own`` are weights that will be there."""
        self._device = torch.empty(0, device=device).device  # "cuda" is "cuda:0"
        moving = {id(parameter) for parameter in own}
        for clone in self.clones.of.values():
            for key, parameter in clone._parameters.items():
                if parameter is not None and id(parameter) not in moving and parameter.device != self._device:
                    clone._parameters[key] = Placeholder.like(parameter, self._device)  # type: ignore[assignment]
        self.refresh()

    def _fire(self, name: str, is_before: bool, hook: Any, module: nn.Module, given: tuple[Any, ...]) -> Any:
        return None if self._active is None else self._active.fire(name, is_before, hook, module, given)

    @property
    def parents(self) -> nn.Module:
        """A module with the buffers of all parents, and for what they keep otherwise."""
        shells = nn.ModuleList()
        for name in self._parents:
            shell = nn.Module()
            shell.__dict__["_buffers"] = self.clones.of[name]._buffers
            shell.__dict__[STANDS_FOR] = self.clones.of[name]
            shells.append(shell)
        return shells

    def _below(self, unit: str) -> list[tuple[nn.Module, nn.Module]]:
        """The modules of a unit: the stand-in's, and those that run."""
        found = []
        for name, module in self.runs[unit].named_modules():
            full = f"{unit}.{name}" if name else unit
            if full in self.clones.of:
                found.append((self.clones.of[full], module))
        return found

    def _share(self, unit: str) -> None:
        """A stand-in of a unit of this stage has the very weights of the unit, and hands on the hooks that it gets."""
        for clone, module in self._inside[unit]:
            self._handed[unit].watch(clone, module)
            clone.__dict__["_parameters"] = module._parameters
            clone.__dict__["_buffers"] = module._buffers

    def _is_inside_a_unit(self, module: str) -> bool:
        return any(module == unit or module.startswith(f"{unit}.") for unit in self._units)

    def _answer(self, name: str, stand_in: nn.Module, run: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._active is None:  # a checkpoint around the unit recomputes it, in the backward
            return self.runs[name](*args, **kwargs)
        if name not in self.runs:
            out = self._active.unit(name, run, run, args, kwargs)
            if has_any_hooks(stand_in):
                fire_added(stand_in, self._known[name], args, kwargs, out)
            return out
        if not self._handed[name].has_any:
            return self._active.unit(name, self.runs[name], run, args, kwargs)
        with self._handed[name].on():
            return self._active.unit(name, self.runs[name], run, args, kwargs)

    def remember(self) -> None:
        """The plain values of parents are now as in the model."""
        self._then = {name: plain_values(self.clones.of[name]) for name in self._parents}

    def carry_home(self) -> None:
        """Give the model what its code has changed since, but where the user has changed it too."""
        for name, then in self._then.items():
            original = vars(self.clones.originals[name])
            for key, now in plain_values(self.clones.of[name]).items():
                if key in then and now != then[key] and original.get(key) == then[key]:
                    original[key] = now

    def free(self, own: Collection[int]) -> None:
        """Forget weights that are on the meta device by now: other processes have them.

        Args:
            own: the ids of weights of stages that are here, which may stand for one that is elsewhere.
        """
        for name, clone in self.clones.of.items():
            original = self.clones.originals[name]
            for here, there in ((clone._parameters, original._parameters), (clone._buffers, original._buffers)):
                for key, tensor in here.items():
                    now = there.get(key)
                    is_gone = now is not None and now.device.type == "meta" and id(tensor) not in own
                    if tensor is not None and now is not None and is_gone:
                        if now is not tensor and isinstance(tensor, Placeholder | nn.Parameter) is False:
                            continue
                        device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
                        here[key] = Placeholder.like(now, device)  # type: ignore[assignment]

    def shell(
        self,
        places: Mapping[tuple[str, str], Collection[tuple[str, str]]],
        owns: bool,
        buffers: Iterable[tuple[str, str]] = (),
    ) -> nn.Module:
        """A module with parameters that glue of this stage uses.

        Args:
            places: per parameter (a module's name and its attribute), where the tree finds it.
            owns: whether it is this stage that holds the model's own one.
            buffers: those of the same module that only this stage's glue uses, and writes.
        """
        made = nn.Module()
        mirror, held = _Mirror(), _Mirror()
        for module, key in buffers:
            both = [(self.clones.of[module]._buffers, key), (self.clones.originals[module]._buffers, key)]
            held.add(key, self.clones.originals[module]._buffers[key], both)
        made.__dict__["_buffers"] = held
        for (module, key), found in places.items():
            parameter = self.clones.originals[module]._parameters[key]
            dicts: list[tuple[dict[str, Any], str]] = [(self.clones.of[m]._parameters, k) for m, k in found]
            if owns:
                dicts += [(self.clones.originals[m]._parameters, k) for m, k in found]
            mirror.add(key, parameter, dicts)
        made.__dict__["_parameters"] = mirror
        return made

    def run(
        self,
        recording: Recording,
        flow: Flow,
        stage: int | None,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        received: Mapping[Value, Tensor],
        draws: Draws,
    ) -> tuple[Any, Callable[[Value], Any]]:
        """Run a stage's part of a forward; its output if it is the last, and what gives its values."""
        self.clones.forget(recording.caches)
        replay = Replay(recording, flow, stage, received, draws, self._device)
        replay.modules, replay.originals = self.clones.of, _Runs(self)
        before, self._active = self._active, replay
        try:
            with draws(AROUND, 0):
                out = replay.run(self.clones.root, *inputs)
        finally:
            self._active = before
        return out, replay.value


class _Runs(Mapping[str, nn.Module]):
    """The modules that a tree's stage runs, by their names in the model."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def __getitem__(self, name: str) -> nn.Module:
        unit = max((u for u in self._tree.runs if name == u or name.startswith(f"{u}.")), key=len)
        return self._tree.runs[unit].get_submodule(name[len(unit) + 1 :])

    def __iter__(self) -> Any:
        return iter(self._tree.runs)

    def __len__(self) -> int:
        return len(self._tree.runs)


class _Mirror(dict[str, Any]):
    """Parameters that are written through to other dicts."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}

    def add(self, key: str, parameter: Any, places: list[tuple[dict[str, Any], str]]) -> None:
        super().__setitem__(key, parameter)
        self._places[key] = places

    def __setitem__(self, key: str, parameter: Any) -> None:
        super().__setitem__(key, parameter)
        for held, name in self._places.get(key, ()):
            held[name] = parameter

    def update(self, *others: Any, **more: Any) -> None:
        for key, parameter in dict(*others, **more).items():
            self[key] = parameter


def inputs_of(
    recording: Recording, stage: int, args: Any, kwargs: Any, received: Mapping[Value, Tensor]
) -> tuple[Any, Any]:
    """The model's inputs as a later stage has them: those that require a gradient came from stage 0."""
    if stage == 0 or not recording.grad_inputs:
        return args, kwargs
    leaves, structure = flatten((args, kwargs))
    for i in recording.grad_inputs:
        leaves[i] = received.get(Value(INPUT, i), Placeholder.like(leaves[i]))
    opened: tuple[Any, Any] = unflatten(leaves, structure)
    return opened


def own_inputs(recording: Recording, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The model's inputs, with copies of those that its code writes into: every stage does, on the same memory."""
    if not recording.written_inputs:
        return args, kwargs
    leaves, structure = flatten((args, kwargs))
    for i in recording.written_inputs:
        leaves[i] = copied_alike(leaves[i])
    opened: tuple[Any, Any] = unflatten(leaves, structure)
    return opened


def shell_of_buffers(module: nn.Module, keys: Iterable[str]) -> nn.Module:
    """A module that has some of a parent's buffers, and writes through to it."""
    made, held = nn.Module(), _Mirror()
    for key in keys:
        held.add(key, module._buffers[key], [(module._buffers, key)])
    made.__dict__["_buffers"] = held
    return made
