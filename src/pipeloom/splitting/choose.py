"""Which modules are units, and where the stages begin."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from pipeloom.recording.node import Node
from pipeloom.splitting.hooks import has_hooks

_FINE = 0.2
"""A module that is at most this part of a stage is a unit, even if nothing repeats it."""
_COARSE = 0.6
"""A repeated block that is at most this part of a stage is a unit whole, even if it repeats something itself."""


@dataclass(frozen=True)
class Weights:
    """How heavy a module or a call is: its share of the model's parameters and of its FLOPs, evenly."""

    num_parameters: int
    num_flops: int

    def of(self, num_parameters: int, num_flops: int) -> float:
        """A share between 0 and 1."""
        shares = []
        if self.num_parameters:
            shares.append(num_parameters / self.num_parameters)
        if self.num_flops:
            shares.append(num_flops / self.num_flops)
        return sum(shares) / len(shares) if shares else 0.0


def count(module: nn.Module) -> int:
    """Parameters of a module, each once."""
    return sum(parameter.numel() for parameter in module.parameters())


def choose_units(tree: Node, opaque: set[str], num_stages: int, descend: set[str]) -> list[str]:
    """The names of the modules whose calls are one op.

    Args:
        tree: the calls of a dry run.
        opaque: modules that cannot be looked into.
        num_stages: how many stages there will be; there are at least as many calls of units, if the model has them.
        descend: modules that must not be units, because a cut was asked for inside of them.
    """
    weights = Weights(count(tree.module), tree.num_flops)
    blocks = _repeated(tree)
    opened = set(descend)
    calls: dict[str, list[Node]] = defaultdict(list)
    for each in _below(tree):
        calls[each.name].append(each)

    def can_open(name: str) -> bool:
        return name not in opaque and any(_has_part(child) for node in calls[name] for child in node.children)

    def is_unit(node: Node) -> bool:
        """By all calls of the module, which may do different things: its parts are units in each of them or in none."""
        name, own = node.name, calls[node.name]
        if not can_open(name):
            return True
        if name in opened:
            return False
        weight = num_stages * weights.of(count(node.module), max(each.num_flops for each in own))
        if has_hooks(node.module):
            return weight <= 1
        if name in blocks:
            return weight <= _COARSE or not any(each.name in blocks for call in own for each in _below(call))
        return weight <= _FINE

    while True:
        found = list(_units(tree, is_unit))
        heavy = [each for each in found if can_open(each.name)]
        if len(found) >= num_stages or not heavy:
            return list(dict.fromkeys(each.name for each in found))
        heaviest = max(heavy, key=lambda node: weights.of(count(node.module), node.num_flops))
        opened.add(heaviest.name)


def skipped(tree: Node, units: Sequence[str], used: Collection[tuple[str, str]]) -> dict[str, str]:
    """Modules with weights that were not called this time (a branch, layer drop), and the unit next to each.

    Args:
        tree: the calls of a dry run.
        units: the names of units.
        used: weights that parents use without a call, by module and name.
    """
    called, holders = {node.name for node in _below(tree)}, {module for module, _ in used}
    found: dict[str, str] = {}
    before = ""
    for name, module in tree.module.named_modules():
        if name in units:
            before = name
        elif name and not any(name.startswith(f"{each}.") for each in (*units, *found)):
            has_part_in = any(each == name or each.startswith(f"{name}.") for each in (*called, *holders))
            is_holder = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
            if not has_part_in and not is_holder and any(True for _ in module.parameters()):
                found[name] = before or units[0]
    return found


def late_ones(names: Collection[str], units: Collection[str]) -> set[str]:
    """Of modules that were not called, those that may be after the last unit: nothing beside them in a list was."""
    lists = {unit[: unit.rfind(f".{part}")] for unit in units for part in unit.split(".") if part.isdigit()}
    return {name for name in names if not (_is_item(name) and name.rpartition(".")[0] in lists)}


def is_heavy(root: nn.Module, names: Collection[str], num_stages: int) -> bool:
    """Whether modules are more than one stage's part of a model's parameters."""
    return num_stages * sum(count(root.get_submodule(name)) for name in names) > count(root)


def _has_part(node: Node) -> bool:
    return not node.is_everywhere


def _units(tree: Node, is_unit: Callable[[Node], bool]) -> Iterator[Node]:
    for node in tree.children:
        if node.is_everywhere or is_unit(node):
            if not node.is_everywhere:
                yield node
        else:
            yield from _units(node, is_unit)


def _below(node: Node) -> Iterator[Node]:
    for child in node.children:
        yield child
        yield from _below(child)


def _repeated(tree: Node) -> set[str]:
    """Modules that are one of several of a kind in the same list: decoder layers, residual blocks."""
    nodes = {node.name: node for node in _below(tree)}
    kinds = Counter((name.rpartition(".")[0], type(node.module)) for name, node in nodes.items() if _is_item(name))
    return {
        name
        for name, node in nodes.items()
        if _is_item(name) and kinds[name.rpartition(".")[0], type(node.module)] > 1 and node.children
    }


def _is_item(name: str) -> bool:
    return name.rpartition(".")[2].isdigit()
