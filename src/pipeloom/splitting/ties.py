"""Weights that several stages use (tied embeddings and heads).

One leaf in two stages would collect gradients from two threads at once, in any order. So every stage but the first that
uses a weight gets a leaf of its own on the same memory: an optimizer that updates the first one updates them all, each
stage accumulates its own share over the micro-batches, and shares are summed last stage first (contract 2). Hooks of
the weight see each share by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeloom.batch.copies import be_alike, leaf_like
from pipeloom.batch.sums import added
from pipeloom.errors import RuntimeStateError, SplitError
from pipeloom.splitting.split import Split

_OWNER = "_pipeloom_owner"


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter of a module, found by the module and its own name for it."""

    module: nn.Module
    name: str

    @property
    def parameter(self) -> nn.Parameter | None:
        """What stands there; None if nothing does."""
        return dict(self.module._parameters.items()).get(self.name)

    def put(self, parameter: nn.Parameter) -> None:
        """Put a parameter there, without what a module does when one is assigned."""
        self.module._parameters[self.name] = parameter


@dataclass(frozen=True, slots=True)
class Tie:
    """A weight of an earlier stage, and what one later stage has in its stead."""

    owner: nn.Parameter
    copy: nn.Parameter
    places: tuple[Place, ...]
    owner_stage: int
    stage: int


class Ties:
    """The tied weights of one cut model; making it gives later stages their copies.

    Args:
        made: the cut model; its modules are changed until `undo`.
        loss_fn: runs on the last stage; a module may hold weights of the model (a head fused with its loss).

    Raises:
        SplitError: ``loss_fn`` holds a layer of another stage.
    """

    def __init__(self, made: Split, loss_fn: Any = None) -> None:
        self._ties: list[Tie] = []
        first_stage: dict[int, int] = {}
        home: dict[int, int] = {}
        for stage in range(made.num_stages):
            later: dict[int, list[Place]] = {}
            is_last = stage == made.num_stages - 1
            for place in places_of([unit.module for unit in made.stages[stage]], loss_fn if is_last else None):
                if home.setdefault(id(place.module), stage) != stage:
                    self.undo()
                    raise _shared_by_loss(place.module)
                owner = _owner(place)
                if first_stage.setdefault(id(owner), stage) != stage:
                    later.setdefault(id(owner), []).append(place)
            self._ties += [_tied(places, first_stage[owner], stage) for owner, places in later.items()]

    def is_copy(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter stands for one of an earlier stage."""
        return any(tie.copy is parameter for tie in self._ties)

    def owner_stage(self, value: Any) -> int | None:
        """The stage that owns what this copy stands for; None if it is no copy."""
        return next((tie.owner_stage for tie in self._ties if tie.copy is value), None)

    def owner_of(self, tensor: Any) -> Any:
        """The weight that a copy stands for; anything else is its own owner."""
        return next((tie.owner for tie in self._ties if tie.copy is tensor), tensor)

    def let_go(self, stages: Collection[int]) -> None:
        """Hold no weight of ties that none of ``stages`` has a part in: their places have other tensors by now."""
        for number, tie in enumerate(self._ties):
            if {tie.owner_stage, tie.stage}.isdisjoint(stages):
                empty = nn.Parameter(torch.empty_like(tie.owner, device="meta"), tie.owner.requires_grad)
                self._ties[number] = replace(tie, owner=empty, copy=empty)

    def weights_of(self, stages: Collection[int]) -> set[int]:
        """The ids of all copies and owners of ties that one of ``stages`` has a part in."""
        own = [tie for tie in self._ties if not {tie.owner_stage, tie.stage}.isdisjoint(stages)]
        return {id(each) for tie in own for each in (tie.owner, tie.copy)}

    def crossing(self, stages: Collection[int]) -> dict[int, Tie]:
        """The ties between one of ``stages`` and one that is elsewhere, by their number."""
        return {i: tie for i, tie in enumerate(self._ties) if (tie.owner_stage in stages) != (tie.stage in stages)}

    def refresh(self, stages: Collection[int]) -> None:
        """Before a step: copies are their owners, also after ``.data`` was assigned or the devices changed.

        Args:
            stages: those whose copies are refreshed.

        Raises:
            RuntimeStateError: it was replaced meanwhile, as another pipeline made from the model does.
        """
        for tie in self._ties:
            if tie.stage not in stages:
                continue
            if any(place.parameter is not tie.copy for place in tie.places):
                raise RuntimeStateError(
                    "a weight that stages share was replaced: another pipeline was made from this model, or its module "
                    "was parametrized or pruned after it was cut",
                    "make each pipeline from a model of its own, or unwrap() the first one before",
                )
            be_alike(tie.copy, tie.owner)
            tie.copy.requires_grad_(tie.owner.requires_grad)
            tie.copy.data = tie.owner.data.to(tie.copy.device)
            if tie.copy.requires_grad and not tie.copy._backward_hooks:
                tie.copy.register_hook(partial(hooked, tie.owner))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def gather(self, stages: Collection[int]) -> None:
        """After a step: sum the shares of what ``stages`` own, last stage first, and add them to its gradient."""
        sums: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        for tie in reversed([tie for tie in self._ties if tie.owner_stage in stages]):
            share, tie.copy.grad = tie.copy.grad, None
            if share is not None:
                share = share.to(tie.owner.device)
                _, earlier = sums.get(id(tie.owner), (tie.owner, None))
                sums[id(tie.owner)] = (tie.owner, added(earlier, share))
        for owner, total in sums.values():
            owner.grad = added(owner.grad, total)

    def undo(self) -> None:
        """Give every stage the one weight again."""
        for tie in self._ties:
            for place in tie.places:
                if place.parameter is tie.copy:
                    place.put(tie.owner)
        self._ties.clear()


def places_of(units: Sequence[nn.Module], loss_fn: Any = None) -> Iterator[Place]:
    """Where the modules of a stage, and the loss function if it is one, have their parameters."""
    for unit in (*units, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])):
        for module in unit.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield Place(module, name)


def _owner(place: Place) -> nn.Parameter:
    """The weight itself; a copy that an earlier pipeline left in the model is replaced by what it stands for."""
    found = place.parameter
    assert found is not None, "places are made of parameters that exist"
    owner: nn.Parameter = getattr(found, _OWNER, found)
    place.put(owner)
    return owner


def _shared_by_loss(module: nn.Module) -> SplitError:
    """`split` refuses layers that two stages share, so it is the loss that has this one."""
    return SplitError(
        f"the loss function holds a {type(module).__name__} that is also a layer of an earlier stage; two threads "
        "would run it at the same time, and add up its gradients in any order",
        "give it the weight, loss_fn.weight = layer.weight, and not the layer",
    )


def hooked(owner: nn.Parameter, share: torch.Tensor) -> torch.Tensor:
    """What the owner's hooks, as they are now, make of a share: a mask for some rows holds in every stage."""
    for hook in (owner._backward_hooks or {}).values():
        share = found if (found := hook(share)) is not None else share
    return share


def _tied(places: list[Place], owner_stage: int, stage: int) -> Tie:
    owner = _owner(places[0])
    copy = leaf_like(owner, owner.detach())
    setattr(copy, _OWNER, owner)
    for place in places:
        place.put(copy)
    return Tie(owner, copy, tuple(places), owner_stage, stage)
