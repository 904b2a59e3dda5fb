"""Modules of a cut model by their names, or by patterns of names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from pipeloom.errors import SplitError, near
from pipeloom.splitting.split import Split
from pipeloom.standins.clone import COMPILED


def named(made: Split, patterns: Sequence[str], what: str) -> list[list[tuple[str, nn.Module]]]:
    """Per stage, the modules that patterns name, each with its name in the whole model.

    A name stands for a module; of one that is cut between stages, or is no unit itself, for the units in it. In a
    pattern ``*`` stands for anything, dots too (``model.layers.*.mlp``). Of modules that contain each other the outer
    one is meant. Single layers of torch are left out: to run one again is to keep what it was given.

    Args:
        made: the cut model.
        patterns: names, or patterns as `fnmatch` has them.
        what: of the argument that was given, for errors.

    Raises:
        SplitError: a pattern names nothing but single layers, nothing at all, or a module that is compiled.
    """
    names = [name for name, _ in made.root.named_modules(remove_duplicate=False) if name]
    wanted: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            message = f"{what}={pattern!r} was given; the model has no module of that name"
            raise SplitError(message, near(pattern, names))
        if not any(_found(made, found)):
            raise SplitError(
                f"{what}={pattern!r} names single layers, or what is cut into such between stages; to run one of these "
                "again is to keep what it was given, which saves nothing",
                "name modules that a stage holds whole (pl.split shows the units), or recompute whole stages (True)",
            )
        wanted |= found
    stages = _found(made, wanted)
    for name, module in (each for stage in stages for each in stage):
        if any(_is_compiled(inner) for inner in module.modules()):
            raise SplitError(
                f"{what} names {name!r}, which is compiled; what runs compiled code again is torch.compile's to decide",
                "leave it out, or recompute its whole stage (True)",
            )
    return stages


def _found(made: Split, wanted: Collection[str]) -> list[list[tuple[str, nn.Module]]]:
    stages = ([each for unit in units for each in _outermost(unit.name, unit.module, wanted)] for units in made.stages)
    return [[(name, module) for name, module in stage if not _is_single(module)] for stage in stages]


def _outermost(unit: str, module: nn.Module, wanted: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """The unit, if it is wanted or in what is wanted; or else what of it is wanted, from outside in."""
    if any(unit == name or unit.startswith(f"{name}.") for name in wanted):
        yield unit, module
        return
    for child_name, child in module.named_children():
        yield from _outermost(f"{unit}.{child_name}" if unit else child_name, child, wanted)


def _is_single(module: nn.Module) -> bool:
    is_of_torch = type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, nn.RNNBase)
    return is_of_torch and not any(True for _ in module.children())


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, COMPILED, None) is not None or hasattr(module, "_orig_mod")
