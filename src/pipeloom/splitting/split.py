"""A model → stages, for `nn.Sequential` and for a list of stage modules.

A *unit* is the smallest thing that a cut can separate: a child of the Sequential, or a module of the list. Units
keep the names that they have in the whole model, so parameters and random draws are called the same however
the model is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from pipeloom.errors import RuntimeStateError, SplitError
from pipeloom.ir.counts import is_whole
from pipeloom.splitting.balance import balanced_cuts
from pipeloom.splitting.cut import Cut, Inputs
from pipeloom.splitting.cuts import Cuts, index_of
from pipeloom.splitting.unit import Unit
from pipeloom.splitting.unpacking import Signature


@dataclass(frozen=True, slots=True)
class Split:
    """A model cut into stages.

    Args:
        root: the whole model, whose names are used; a list of modules becomes an `nn.ModuleList`.
        stages: per stage its units, in call order; in a model that was cut by running it also what its glue trains.
        cut: how such a model runs; None runs the units one after another.
    """

    root: nn.Module
    stages: tuple[tuple[Unit, ...], ...]
    cut: Cut | None = None

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.stages)

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units, in call order."""
        return tuple(unit for units in self.stages for unit in units)

    def parameters(self, of_loss: Iterable[nn.Parameter] = ()) -> list[list[nn.Parameter]]:
        """Per stage its parameters, each once; those of the loss function that are the model's nowhere are the last's.

        With `Ties`, none is in two stages.
        """
        found = [[each for unit in units for each in unit.module.parameters()] for units in self.stages]
        known = {id(each) for parameters in found for each in parameters}
        found[-1] += [each for each in of_loss if id(each) not in known]
        return [list(dict.fromkeys(parameters)) for parameters in found]

    def check_unchanged(self) -> None:
        """Raise if the model has got other layers since it was cut.

        Raises:
            RuntimeStateError: a layer was replaced, added or removed; the stages would run the old ones.
        """
        if self.cut is not None:
            self.cut.check_unchanged()
            return
        now = [(name, id(child)) for name, child in self.root._modules.items() if child is not None]
        then = [(unit.name, id(unit.module)) for unit in self.units]
        if now != then and self.units[0].module is not self.root:
            changed = sorted({name for name, _ in set(now) ^ set(then)})
            raise RuntimeStateError(
                f"layers {', '.join(changed)} of the model were replaced, added or removed after it was cut; "
                "the stages would run the old ones",
                "unwrap() the pipeline, change the model, and make a new one",
            )


def split(
    model: nn.Module | Sequence[nn.Module],
    *,
    num_stages: int | None = None,
    cuts: Cuts | None = None,
    inputs: Inputs | None = None,
) -> Split:
    """Cut a model into stages.

    Args:
        model: an `nn.Sequential`, whose children are the units; a list of modules, each one a stage; or any module,
            which is run once without numbers.
        num_stages: how many stages; they are balanced. By default the number of modules of a list, else 1 without
            ``cuts``.
        cuts: ``[2, 5, 7]`` starts a new stage before children (or calls of units) 2, 5 and 7: four stages; names of
            modules before these; as many numbers as stages are their sizes.
        inputs: positional and keyword arguments of a module that is no Sequential; shapes and types are what counts.

    Raises:
        SplitError: the cuts are out of order or out of range, there are more stages than units, ``cuts`` and
            ``num_stages`` disagree, two stages share a module or buffer, or the model's code depends on numbers.
    """
    check_count(num_stages)
    if isinstance(model, nn.Module) and needs_inputs(model, num_stages, cuts):
        if inputs is None:
            raise SplitError(
                f"a {type(model).__name__} is cut by running it, and no inputs were given",
                "pass example_args= or example_kwargs=, or call step() first",
            )
        cut = Cut(model, inputs, num_stages, cuts)
        return Split(model, cut.stages, cut)
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        made = _split_module(model, num_stages, cuts)
    elif isinstance(model, Iterable):
        made = _split_list(list(model), num_stages, cuts)
    else:
        raise SplitError(f"{model!r} was given; an nn.Sequential or a list with one module per stage is needed")
    _refuse_sharing(made)
    return made


def needs_inputs(model: Any, num_stages: int | None, cuts: Cuts | None) -> bool:
    """Whether a model is cut by running it: a module with a forward of its own, for more than one stage."""
    if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList):
        return False
    if _is_chain(model):
        return _is_inside(model, cuts)
    return (num_stages or 1) > 1 or bool(cuts)


def _is_inside(model: nn.Module, cuts: Any) -> bool:
    """Whether a cut is asked for inside of a child of a chain."""
    names = [each for each in cuts if isinstance(each, str)] if isinstance(cuts, list | tuple) else []
    return any(name not in model._modules for name in names) and {*names} <= {*dict(model.named_modules())}


def check_count(num_stages: int | None) -> None:
    """Raise `SplitError` for a number of stages that is none."""
    if num_stages is not None and (not is_whole(num_stages) or num_stages < 1):
        raise SplitError(f"num_stages={num_stages!r} was given; a whole number of at least 1 is needed")


def _split_module(model: nn.Module, num_stages: int | None, cuts: Any) -> Split:
    if not _is_chain(model):
        return Split(model, ((Unit("", model),),))
    units = _children(model)
    return Split(model, _grouped(units, _checked_cuts(units, num_stages, cuts)))


def _is_chain(model: nn.Module) -> bool:
    """Whether calling the children one after another is what the model does."""
    is_plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    return is_plain and "forward" not in vars(model) and len(model._modules) > 0


def _children(model: nn.Module) -> list[Unit]:
    """All children by name, a module that stands twice twice (`named_children` would drop it)."""
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
    if any(hooks):
        raise SplitError(
            "the nn.Sequential has hooks of its own; it is never called as a whole, so they would never run",
            "register them on its children",
        )
    return [Unit(name, child) for name, child in model._modules.items() if child is not None]


def _checked_cuts(units: Sequence[Unit], num_stages: int | None, cuts: Sequence[int] | None) -> list[int]:
    if cuts is None:
        wanted = num_stages or 1
        if wanted > len(units):
            raise SplitError(
                f"{wanted} stages were asked for, but the model has {len(units)} layers; a stage needs at least one",
                f"ask for at most {len(units)} stages",
            )
        return balanced_cuts([_weight(unit.module) for unit in units], wanted)
    cuts = cuts.tolist() if hasattr(cuts, "tolist") else cuts  # of numpy
    if isinstance(cuts, str) or not isinstance(cuts, Sequence):
        raise SplitError(f"cuts={cuts!r} was given; a sequence of whole numbers is needed, such as [2, 5]")
    cuts = _starts([unit.name for unit in units], num_stages, cuts)
    if num_stages is not None and num_stages != len(cuts) + 1:
        raise SplitError(f"cuts={list(cuts)} make {len(cuts) + 1} stages, but num_stages={num_stages} was given too")
    bounds = [0, *cuts, len(units)]
    if not all(map(is_whole, cuts)) or any(before >= after for before, after in pairwise(bounds)):
        raise SplitError(
            f"cuts={list(cuts)} were given; whole numbers are needed, ascending, from 1 to {len(units) - 1}, "
            "each the index of the first layer of a new stage"
        )
    return list(cuts)


def _starts(names: Sequence[str], num_stages: int | None, cuts: Sequence[Any]) -> Sequence[Any]:
    """Names and sizes as indices."""
    if cuts and all(isinstance(each, str) for each in cuts):
        return [index_of(names, each) for each in cuts]
    is_sizes = num_stages == len(cuts) and all(map(is_whole, cuts)) and sum(cuts) == len(names)
    return [*accumulate(cuts)][:-1] if is_sizes else cuts


def _weight(module: nn.Module) -> int:
    """Parameters of a layer, and one for the layer itself."""
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters()):
        raise SplitError(
            f"the model holds a lazy {type(module).__name__}, which has no size before its first call; stages are "
            "balanced by the parameters of their layers",
            "call the model once before, or say where to cut with cuts=",
        )
    return 1 + sum(parameter.numel() for parameter in module.parameters())


def _grouped(units: Sequence[Unit], cuts: Sequence[int]) -> tuple[tuple[Unit, ...], ...]:
    return tuple(tuple(units[start:end]) for start, end in pairwise([0, *cuts, len(units)]))


def _split_list(modules: list[nn.Module], num_stages: int | None, cuts: Cuts | None) -> Split:
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        kinds = ", ".join(type(module).__name__ for module in modules) or "nothing"
        raise SplitError(f"a list of {kinds} was given; one nn.Module per stage is needed")
    if cuts is not None or num_stages not in (None, len(modules)):
        raise SplitError(
            f"a list of {len(modules)} stage modules was given with num_stages={num_stages}, cuts={cuts}; "
            f"a list is {len(modules)} stages already",
            "pass nn.Sequential(*modules) to have it cut",
        )
    units = [Unit(str(i), module, Signature.of(module)) for i, module in enumerate(modules)]
    return Split(nn.ModuleList(modules), tuple((unit,) for unit in units))


def _refuse_sharing(made: Split) -> None:
    """Weights may be tied (see `ties`); a module or a buffer that two threads write at once may not be shared."""
    owner: dict[int, tuple[int, str]] = {}
    for stage, name, shared in _modules_and_buffers(made):
        first_stage, first_name = owner.setdefault(id(shared), (stage, name))
        if first_stage != stage:
            what = "buffer" if isinstance(shared, torch.Tensor) else "module"
            raise SplitError(
                f"{name!r} of stage {stage} is the same {what} as {first_name!r} of stage {first_stage}; two stages "
                "would run and change it at the same time",
                "choose cuts= that keep its uses in one stage",
            )


def _modules_and_buffers(made: Split) -> Iterator[tuple[int, str, nn.Module | torch.Tensor]]:
    for stage, units in enumerate(made.stages):
        for unit in units:
            prefix = f"{unit.name}." if unit.name else ""
            with_state = ((name, each) for name, each in unit.module.named_modules() if _has_state(each))
            for name, each in (*with_state, *unit.module.named_buffers()):
                yield stage, (prefix + name).rstrip("."), each


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))
