"""The second replica of a cut model, for schedules that run two through the same ranks (Chimera, DualPipe).

Both replicas have one set of weights. The second one has clones of all modules, cut alike, and in each of its stages a
leaf of its own on the memory of each weight, as `ties` makes them for weights that stages share: so the replicas
accumulate apart, each in the order of its own micro-batches, and an optimizer that updates the first updates both.
The model as a whole, its names, state and norms, is the first replica alone.

What a forward writes into buffers would be written by both at the same time, in any order; the runtime looks, and for
known kinds of layers it is refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from pipeloom.batch.copies import be_alike, leaf_like
from pipeloom.batch.losses import LossRule, StepLoss
from pipeloom.batch.sums import added
from pipeloom.errors import LossError, RuntimeStateError, SplitError
from pipeloom.splitting.hidden import refuse_hidden
from pipeloom.splitting.share import Share
from pipeloom.splitting.split import Split
from pipeloom.splitting.structure import Structure
from pipeloom.splitting.ties import Place, Ties, hooked, places_of
from pipeloom.splitting.unit import Unit
from pipeloom.standins.clone import HOOK_KINDS, Clones
from pipeloom.standins.followed import OF_EVERY_MODULE
from pipeloom.standins.scripted import is_scripted

_ONE_REPLICA = "take a schedule with a single replica: dualpipe-v for dualpipe, zb-v, interleaved-zb"


@dataclass(slots=True)
class _Pair:
    """A weight of a stage.

    Args:
        place: where the first replica has it.
        leaf: what stood there when the replicas were made.
        copy: the second replica's leaf; None where another process has that.
    """

    place: Place
    leaf: nn.Parameter
    copy: nn.Parameter | None

    @property
    def now(self) -> nn.Parameter:
        """What the first replica has by now.

        Raises:
            RuntimeStateError: it has none any more.
        """
        found = self.place.parameter
        if found is None:
            raise RuntimeStateError(
                f"the weight {self.place.name!r} of a {type(self.place.module).__name__} is gone: the module was "
                "parametrized or pruned after it was cut, and the second replica still runs the old one",
                "unwrap() the pipeline, change the model, and make a new one",
            )
        return found


class Replica:
    """Clones of a cut model's modules with leaves of their own.

    Args:
        made: the cut model.
        ties: its tied weights.
        rule: its loss.
        cut: cuts a clone of the model's root as the model was cut; used only where that is done by running it.

    Attributes:
        split: the second replica, cut.
        loss_fn: what it computes its losses with.

    Raises:
        SplitError: the model has modules that can't be cloned.
        LossError: the loss function learns weights that it does not hold itself.
    """

    def __init__(self, made: Split, ties: Ties, rule: LossRule, cut: Callable[[nn.Module], Split]) -> None:
        _refuse_uncloned(made.root)
        self._clones = [_cloned(made.root, ties)]
        self.split = cut(self._clones[0].root) if made.cut is not None else _alike(made, self._clones[0])
        self.loss_fn = rule.loss_fn
        if isinstance(rule.loss_fn, nn.Module) and rule.parameters:
            self._clones.append(_cloned(rule.loss_fn, ties))
            self.loss_fn = self._clones[1].root
        elif any(each.requires_grad for each in rule.parameters):
            raise LossError(
                "the loss function uses weights that it finds around it; the schedule runs two replicas of the model, "
                "and both would add up their gradients in any order",
                "make it a module that holds them: its second replica gets leaves of its own",
            )
        names, others = ([[unit.name for unit in units] for units in each.stages] for each in (made, self.split))
        assert names == others, "a clone is cut as the model is"
        self._pairs = [self._paired(made, stage) for stage in range(made.num_stages)]
        for clones in self._clones:
            refuse_hidden(clones)
        self._structures = [Structure(clones.originals[""]) for clones in self._clones]

    def _paired(self, made: Split, stage: int) -> list[_Pair]:
        is_last = stage == made.num_stages - 1
        first, second = (
            places_of([unit.module for unit in each.stages[stage]], self._loss_module(i) if is_last else None)
            for i, each in enumerate((made, self.split))
        )
        pairs: dict[int, _Pair] = {}
        copies: dict[int, nn.Parameter] = {}
        for place, other in zip(first, second, strict=True):
            leaf, old = place.parameter, other.parameter
            assert leaf is not None, "places are made of parameters that exist"
            if id(leaf) not in pairs:
                pairs[id(leaf)] = _Pair(place, leaf, leaf_like(leaf, leaf.detach()))
            copy = pairs[id(leaf)].copy
            assert copy is not None, "made above"
            other.put(copy)
            copies[id(old)] = copy
        for module in (each for unit in self.split.stages[stage] for each in unit.module.modules()):
            _lead_lists(module, copies)
        return list(pairs.values())

    def _loss_module(self, replica: int) -> nn.Module | None:
        if len(self._clones) == 1:
            return None
        return self._clones[1].root if replica else self._clones[1].originals[""]

    # Before a step.

    def follow(self) -> None:
        """Be as the first replica by now: modes, attributes, hooks and buffers.

        Raises:
            RuntimeStateError: a module was replaced, added or removed, or has another class or new parameters.
            SplitError: a layer would write statistics that both replicas share, or was given an object that holds
                modules or weights.
        """
        for structure in self._structures:
            structure.check()
        for clones in self._clones:
            if changed := clones.follow():
                self._lead(clones, {name for name, _ in changed})
            for name, clone in clones.of.items():
                original = clones.originals[name]
                _refuse_statistics(name, original)
                for key in clone._buffers.keys() - original._buffers.keys():
                    del clone._buffers[key]
                for kind in HOOK_KINDS:
                    here, theirs = vars(clone)[kind], vars(original)[kind]
                    if here or theirs:
                        here.clear()
                        here.update(theirs)
                _follow_buffers(original._buffers, clone._buffers)

    def _lead(self, clones: Clones, names: Collection[str]) -> None:
        """Let what was changed in modules of the first replica lead to modules and leaves of the second."""
        both = [(pair.now, pair.copy) for pairs in self._pairs for pair in pairs]
        copies = {id(leaf): copy for leaf, copy in both if copy is not None}
        for name in names:
            _lead_lists(clones.of[name], copies)
        refuse_hidden(clones)

    def refresh(self) -> None:
        """Let the leaves be the first replica's weights, also after ``.data`` was assigned or devices changed.

        Where a weight's stage is in another process its numbers come from there.

        Raises:
            RuntimeStateError: a weight is gone, or has a hook that runs whenever a gradient was added to it.
        """
        for pairs in self._pairs:
            for pair in pairs:
                _refuse_late_hooks(pair.place)
                if pair.copy is not None:
                    now = pair.now
                    be_alike(pair.copy, now)
                    pair.copy.requires_grad_(now.requires_grad)
                    if not now.is_meta:
                        pair.copy.data = now.data.to(pair.copy.device)
                    if now.requires_grad and not pair.copy._backward_hooks:
                        pair.copy.register_hook(partial(_hooked, pair))  # type: ignore[no-untyped-call]

    # What the runtime asks for, by stage.

    def loss_of(self, loss: StepLoss) -> StepLoss:
        """A step's losses as the second replica finds them."""
        return loss.with_loss_fn(self.loss_fn)

    def leaves(self, stage: int) -> list[nn.Parameter]:
        """The first replica's weights."""
        return [pair.now for pair in self._pairs[stage]]

    def copies(self, stage: int) -> list[nn.Parameter]:
        """The second replica's, in the same order; none where another process has them."""
        return [pair.copy for pair in self._pairs[stage] if pair.copy is not None]

    def shares(self, stage: int) -> list[Tensor | None]:
        """What the second replica has added up in this step; it has nothing left then."""
        found = []
        for copy in self.copies(stage):
            found.append(copy.grad)
            copy.grad = None
        return found

    @torch.no_grad()
    def add(self, stage: int, shares: Sequence[Tensor | None]) -> None:
        """Add the second replica's gradients to the first's."""
        for leaf, share in zip(self.leaves(stage), shares, strict=True):
            if share is not None:
                leaf.grad = added(leaf.grad, share.to(leaf.device))

    def free(self, stages: Collection[int]) -> None:
        """Keep only what is of ``stages``; other processes have the rest."""
        Share(self.split, Ties(Split(self.split.root, ())), stages).release()
        for stage, pairs in enumerate(self._pairs):
            for pair in pairs if stage not in stages else ():
                pair.copy = None


def _cloned(root: nn.Module, ties: Ties) -> Clones:
    """A clone of a module, whose weights are those that tied ones stand for."""
    clones = Clones(root, lambda _, __: False, _unanswered)
    for clone in clones.of.values():
        for name, parameter in clone._parameters.items():
            clone._parameters[name] = ties.owner_of(parameter)
    return clones


def _alike(made: Split, clones: Clones) -> Split:
    """A chain of clones, cut as the originals are."""
    clone_of = {id(clones.originals[name]): clone for name, clone in clones.of.items()}
    stages = (tuple(Unit(u.name, clone_of[id(u.module)], u.signature) for u in units) for units in made.stages)
    return Split(clones.root, tuple(stages))


def _lead_lists(module: nn.Module, copies: Mapping[int, nn.Parameter]) -> None:
    """Let lists and dicts of a clone, which are its own, have the leaves: recurrent layers keep weights in one."""
    for key, value in vars(module).items():
        if type(value) is list:
            value[:] = [copies.get(id(each), each) for each in value]
        elif type(value) is dict and key not in OF_EVERY_MODULE:
            value.update({name: copies[id(each)] for name, each in value.items() if id(each) in copies})


def _follow_buffers(originals: dict[str, Tensor | None], clones: dict[str, Tensor | None]) -> None:
    for key, buffer in originals.items():
        here = clones.get(key)
        if buffer is None or not buffer.is_meta:  # those on the meta device are in another process
            has_moved = buffer is not None and here is not None and here.device != buffer.device
            clones[key] = buffer.to(here.device) if has_moved and buffer is not None and here is not None else buffer


def _hooked(pair: _Pair, share: Tensor) -> Tensor:
    """What the weight's hooks make of a share; where its stage is elsewhere it is not the one that had them first."""
    now = pair.now
    return hooked(now, share if now is pair.leaf else hooked(pair.leaf, share))


def _refuse_uncloned(root: nn.Module) -> None:
    for name, module in root.named_modules():
        if is_scripted(module) and any(True for _ in module.parameters()):
            raise SplitError(
                f"{name!r} is a module of TorchScript; the schedule runs two replicas of the model, and it can't be "
                "given leaves of its own for the second one",
                _ONE_REPLICA,
            )
        if any(isinstance(each, UninitializedParameter) for each in module._parameters.values()):
            raise SplitError(
                f"{name!r} is a lazy {type(module).__name__}, whose weights are made in its first call; the schedule "
                "runs two replicas of the model, which would each make some",
                "call the model once before",
            )


def _refuse_late_hooks(place: Place) -> None:
    if getattr(place.parameter, "_post_accumulate_grad_hooks", None):
        raise RuntimeStateError(
            f"the weight {place.name!r} of a {type(place.module).__name__} has a hook that runs after a gradient was "
            "accumulated; the schedule runs two replicas of the model, and it would see what one of them adds up",
            f"do its work after the step, or {_ONE_REPLICA}",
        )


def _refuse_statistics(name: str, module: Any) -> None:
    has_statistics = getattr(module, "track_running_stats", False) and module._buffers.get("running_mean") is not None
    if has_statistics and module.training:
        raise SplitError(
            f"{name!r} is a {type(module).__name__} that keeps running statistics; the schedule runs two replicas of "
            "the model at the same time, which would update them in any order",
            f"put it into eval mode, give it track_running_stats=False, or {_ONE_REPLICA}",
        )


def _unanswered(*_: Any) -> Any:
    raise AssertionError("no call of these clones is answered")
