"""Which stage has which module and which weight; the trees by which stages run their part of the model's code.

A unit belongs to the stages that call it. What the code around units uses itself, a weight of a parent, belongs to the
stages that run that code, and what nothing uses to one of them, so that every parameter is somebody's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from pipeloom.splitting.plan import Plan
from pipeloom.splitting.tree import Tree, shell_of_buffers
from pipeloom.splitting.unit import Unit
from pipeloom.standins.clone import Clones
from pipeloom.standins.followed import Place


class Owners:
    """What each stage has.

    Args:
        root: the model.
        units: names of the modules that run whole in a stage.
        stage_of_call: by unit and number of its call in one forward.
        plan: for the inputs by which the model was cut.
        owned: buffers and attributes of the code around units that one stage alone uses.
        num_stages: how many stages.

    Attributes:
        stages: per stage its units, and shells around the weights that its code uses besides.
        trees: by stage, what runs its part of the code.
        shared_buffers: those that the code of every stage writes, and each alike.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[str],
        stage_of_call: Mapping[tuple[str, int], int],
        plan: Plan,
        owned: frozenset[Place],
        num_stages: int,
    ) -> None:
        self._root = root
        self._units = units
        self._stage_of_call = stage_of_call
        self._first = plan.recording
        self._stage_of_op = plan.flow.stage_of
        self._owned = owned
        self._num_stages = num_stages
        self._repeated: dict[tuple[str, int], Clones] = {}
        self.shared_buffers = [place for place in self._first.written_buffers if place not in owned]
        self.trees: dict[int, Tree] = {}
        self.stages = self._laid_out()

    def is_cloned(self, module: str) -> bool:
        """Whether stages run clones of a module: one around units, or a unit of several stages."""
        return not is_inside(module, self._units) or is_inside(module, [unit for unit, _ in self._repeated])

    def refresh(self) -> None:
        """Let what stages have of their parents be as in the model."""
        for tree in self.trees.values():
            tree.refresh()
        for clones in self._repeated.values():
            clones.follow()

    def everywhere(self, owned: frozenset[Place]) -> tuple[Unit, ...]:
        """The buffers of parents but those that one stage owns: every process has them."""
        found = []
        for name, module in self._root.named_modules():
            keys = [key for key in module._buffers if (name, key) not in owned]
            if keys and not is_inside(name, self._units):
                found.append(Unit(name, shell_of_buffers(module, keys)))
        return tuple(found)

    def _laid_out(self) -> tuple[tuple[Unit, ...], ...]:
        """Per stage its units and shells; builds the trees."""
        modules = dict(self._root.named_modules(remove_duplicate=False))
        owner: dict[int, int] = {}
        stages: list[list[Unit]] = []
        glue = self._glue_weights()
        covered: set[int] = set()
        for stage in range(self._num_stages):
            names = [n for n in self._units if any(s == stage for (u, _), s in self._stage_of_call.items() if u == n)]
            runs = {name: self._own(name, modules[name], stage, owner) for name in names}
            tree = Tree(self._root, self._units, runs, self.shared_buffers, is_first=stage == 0)
            self.trees[stage] = tree
            units = [Unit(name, runs[name]) for name in names]
            for parent, places in _by_module(glue[stage]).items():
                used = [(m, k) for m, k in places if k in modules[m]._parameters]
                here = {(m, k): self._places(modules[m]._parameters[k]) for m, k in used}
                is_owner = all(id(modules[m]._parameters[k]) not in covered for m, k in used)
                units.append(Unit(parent, tree.shell(here, owns=is_owner, buffers=set(places) - set(used))))
            for unit in units:
                covered |= {id(each) for each in unit.module.parameters()}
            stages.append(units)
        rest = 0 if self._first.tail is None else self._num_stages - 1
        stages[rest] += self._rest(covered, rest)
        return tuple(map(tuple, stages))

    def _own(self, unit: str, module: nn.Module, stage: int, owner: dict[int, int]) -> nn.Module:
        """The module itself, or a clone where an earlier stage runs a part of it: its weights then have two places."""
        first = {id(each): owner.setdefault(id(each), stage) for each in module.modules()}
        if all(each == stage for each in first.values()):
            return module
        clones = Clones(module, lambda _, __: False, _unanswered)
        for name, original in clones.originals.items():
            kept = ("_buffers", "_parameters") if first[id(original)] == stage else ("_buffers",)
            clones.of[name].__dict__.update((key, vars(original)[key]) for key in kept)
        self._repeated[unit, stage] = clones
        return clones.root

    def _glue_weights(self) -> list[set[tuple[str, str]]]:
        """Per stage, the parameters that its glue uses."""
        found: list[set[tuple[str, str]]] = [set() for _ in range(self._num_stages)]
        staged = zip(self._first.ops, self._stage_of_op, strict=True)
        uses = [(place, stage) for op, stage in staged for place in op.weights if stage is not None]
        uses += [(place, self._num_stages - 1) for place in (*self._first.result_weights, *self._usable_in_tail())]
        for place, stage in uses:
            if self._root.get_submodule(place[0])._parameters.get(place[1]) is not None or place in self._owned:
                found[stage].add(place)
        own: dict[int, set[int]] = {}
        for (name, _), stage in self._stage_of_call.items():
            own.setdefault(stage, set()).update(id(p) for p in self._root.get_submodule(name).parameters())
        return [
            {p for p in places if id(self._root.get_submodule(p[0])._parameters.get(p[1])) not in own.get(stage, ())}
            for stage, places in enumerate(found)
        ]

    def _usable_in_tail(self) -> Iterator[tuple[str, str]]:
        """What the last stage may use where it goes on without a plan, whoever used it before."""
        if self._first.tail is not None:
            for name, module in self._root.named_modules():
                if not is_inside(name, self._units):
                    yield from ((name, key) for key in module._parameters)

    def _places(self, parameter: Any) -> list[tuple[str, str]]:
        return [
            (name, key)
            for name, module in self._root.named_modules()
            for key, each in module._parameters.items()
            if each is parameter
        ]

    def _rest(self, covered: set[int], stage: int) -> list[Unit]:
        """Parameters that nothing used so far: stage 0 keeps them, or the last, if code without a plan may use them."""
        found = []
        for name, module in self._root.named_modules():
            if is_inside(name, self._units):
                continue
            keys = [k for k, p in module._parameters.items() if p is not None and id(p) not in covered]
            covered |= {id(module._parameters[key]) for key in keys}
            places = [(name, key) for key in keys]
            shell = self.trees[stage].shell({place: [place] for place in places}, owns=True)
            if places:
                found.append(Unit(name, shell))
        return found


def is_inside(module: str, units: Sequence[str]) -> bool:
    """Whether a module is a unit or in one, by names."""
    return any(module == unit or module.startswith(f"{unit}.") for unit in units)


def _by_module(places: set[tuple[str, str]]) -> Mapping[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for place in sorted(places):
        found[place[0]].append(place)
    return found


def _unanswered(*_: Any) -> Any:
    raise AssertionError("no call of these clones is answered")
