"""The parts of a pipeline, put together once it is known how the model is cut.

A Sequential, or a list of stages, is cut when the pipeline is made. Any other model is cut by running it without
numbers, and what it runs on are the first inputs; until then the pipeline has parameters, but no stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeloom.batch.losses import LossRule
from pipeloom.errors import RuntimeStateError, SplitError
from pipeloom.ir import Links, Placement
from pipeloom.processes import Company, TransportName, join
from pipeloom.programs import Programs
from pipeloom.ranks import Devices, Ranks, place
from pipeloom.runtime.batch_norm import DeferredStatistics
from pipeloom.runtime.crossing import Plan
from pipeloom.runtime.gradients import set_grad_dtype
from pipeloom.splitting import Inputs, Replica, Share, Split, Ties, check_here, needs_inputs, split
from pipeloom.weights.build import build
from pipeloom.weights.match import held_at, match, places_of
from pipeloom.weights.materialise import materialise
from pipeloom.weights.stored import Weights

Model = nn.Module | Sequence[nn.Module]
Draws = Callable[[int], Callable[[str, int], AbstractContextManager[Any]]]
"""Per micro-batch, what is put around draws of random numbers."""


@dataclass(frozen=True)
class Recipe:
    """What a pipeline is made of, before it is known how the model is cut.

    Args:
        model: a module, or a list of them.
        num_stages: how many stages.
        cuts: where to cut.
        programs: what runs.
        rule: the loss.
        company: the processes that are ranks; None: ranks are threads.
        devices: one per rank.
        is_deferred: whether BatchNorm's running statistics are those of the whole batch.
        grad_dtype: in which gradients are accumulated.
        weights: where parameters on the meta device are read from.
    """

    model: nn.Module | Sequence[nn.Module]
    num_stages: int | None
    cuts: Any
    programs: Programs
    rule: LossRule
    company: Company | None
    devices: Devices | None
    is_deferred: bool
    grad_dtype: torch.dtype | None
    weights: str | Path | None = None

    @property
    def needs_inputs(self) -> bool:
        """Whether the model is cut by running it."""
        return needs_inputs(self.model, self.num_stages, self.cuts)

    def whole(self) -> Share:
        """The model before it is cut: all of it is here.

        Raises:
            RuntimeStateError: where ranks are processes, nobody knows yet what is here.
        """
        if self.company is not None:
            raise RuntimeStateError(
                "the model is cut by running it, and no inputs are known yet, so neither is what this rank has",
                "pass example_args= or example_kwargs= to the pipeline, or call step() first",
            )
        assert isinstance(self.model, nn.Module), "a list is cut at once"
        uncut = Split(self.model, ())
        return Share(uncut, Ties(uncut), ())

    def example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """The example inputs, or those of the model itself where it has to be cut before the first step.

        Hugging Face's models have such; each process has to know its stages before it reads weights, or gives their
        parameters to an optimizer.
        """
        has_time = self.weights is None and self.company is None
        if args or kwargs or has_time or not self.needs_inputs or not isinstance(self.model, nn.Module):
            return args, kwargs
        given = getattr(self.model, "dummy_inputs", None)
        takes = inspect.signature(self.model.forward).parameters
        return (), dict(given) if isinstance(given, Mapping) and set(given) <= set(takes) else {}

    def assembled(self, given: Inputs | Split) -> Assembly:
        """Cut the model by inputs, unless it is cut already, and put its stages where they run."""
        inputs = None if isinstance(given, Split) else given
        cut = partial(split, num_stages=self.num_stages, cuts=self.cuts, inputs=inputs)
        made = given if isinstance(given, Split) else cut(self.model)
        if self.weights is not None:
            self._read(made)
        ties = Ties(made, self.rule.loss_fn)
        replica = self._replica(made, ties, cut)
        ranks = place(made, ties, replica, self.programs, self.rule, self.company, self.devices)
        own = nn.ModuleList(unit.module for stage in sorted(ranks.stages) for unit in made.stages[stage])
        if self.grad_dtype is not None:
            copies = () if replica is None else (each for s in range(made.num_stages) for each in replica.copies(s))
            set_grad_dtype((*own.parameters(), *copies), self.grad_dtype)
        statistics = DeferredStatistics(own if self.is_deferred else nn.Module())
        return Assembly(made, ties, ranks, statistics, self.programs.placement, replica)

    def _replica(self, made: Split, ties: Ties, cut: Callable[[nn.Module], Split]) -> Replica | None:
        """The second replica, where the placement has two."""
        if not self.programs.placement.opposed:
            return None
        try:
            return Replica(made, ties, self.rule, cut)
        except BaseException:
            ties.undo()
            raise

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks what failed here before the stages were placed; all of them may try again."""
        if self.company is not None:
            self.company.tell(error)

    def close(self, built: Assembly | None, error: BaseException | None = None) -> None:
        """End the threads, or the connections to the other ranks, who are told the error if that is why."""
        if built is not None:
            built.ranks.runtime.close_after(error)
        elif self.company is not None:
            self.company.close_after(error)

    def take_apart(self, built: Assembly | None) -> None:
        """Make the model whole again, leave it as it was found, and close."""
        if built is None:
            self.close(None)
        else:
            built.take_apart()

    def _read(self, made: Split) -> None:
        """Read what this process will have of the model: its stages' parameters, and all buffers of parents."""
        assert self.weights is not None, "the caller looks"
        world, placement = None if self.company is None else self.company.world, self.programs.placement
        own = range(placement.num_stages) if world is None else placement.stages_of(world.rank)
        modules = [unit.module for stage in own for unit in made.stages[stage]]
        modules += [unit.module for unit in (made.cut.everywhere if made.cut else ())]
        here = {id(each) for module in modules for each in (*module.parameters(), *module.buffers())}
        places = [place for place in places_of(made.root) if id(held_at(*place[1:])) in here]
        device = torch.device("cpu") if world is None else world.device
        materialise(places, match(made.root, Weights(self.weights)), device or torch.device("cpu"))


@contextmanager
def joined(transport: TransportName, limit_s: float) -> Iterator[Company | None]:
    """Around all that makes a pipeline: the processes that are its ranks, who are told what fails in it on one alone.

    Raises:
        PeerFailed: one of them is gone.
        ProcessError: they do not find each other.
    """
    company = join(transport, limit_s)
    try:
        yield company
    except BaseException as error:
        if company is not None:
            company.tell(error)
        raise


def made_by(model: Model | None, factory: Callable[[], nn.Module] | None, weights: str | Path | None) -> Model:
    """The model that was given, or that a factory makes: without parameters if they will be read from files.

    Raises:
        SplitError: both or none was given, the factory cannot be called, or does not make a module.
        RuntimeStateError: other processes have a part of the model, by an earlier pipeline.
    """
    if factory is None and model is not None:
        check_here(model)
        return model
    if factory is None or model is not None:
        raise SplitError(
            f"{'no' if model is None else 'a'} model and {'no' if factory is None else 'a'} factory were given; one "
            "of them is needed"
        )
    if not callable(factory):
        raise SplitError(f"factory={factory!r} was given; a function without arguments that makes the model is needed")
    made = build(factory) if weights is not None else factory()
    if not isinstance(made, nn.Module):
        raise SplitError(f"factory={factory!r} made {made!r}; an nn.Module is needed")
    return made


@dataclass(frozen=True)
class Assembly:
    """A model, cut, with its stages where they run.

    Args:
        split: the cut.
        ties: weights that stages share.
        ranks: where its stages are.
        statistics: BatchNorm's, where they are those of the whole batch.
        placement: which rank runs which stage.
        replica: the second one, where the placement has two.
    """

    split: Split
    ties: Ties
    ranks: Ranks
    statistics: DeferredStatistics
    placement: Placement
    replica: Replica | None = None

    def refresh(self) -> None:
        """Before a step: stages have the weights that the model has by now.

        Raises:
            RuntimeStateError: the model was changed after it was cut.
        """
        self.split.check_unchanged()
        self.ties.refresh(self.ranks.stages)
        if self.replica is not None:
            self.replica.refresh()

    def take_apart(self) -> None:
        """Make the model whole again, and leave it as it was found."""
        runtime, share = self.ranks.runtime, self.ranks.share
        runtime.wait_for_late_ranks()
        if not share.is_whole:
            share.fill(runtime.to_all(share.contents()))
        runtime.close()
        self.ties.undo()
        if self.split.cut is not None:
            self.split.cut.carry_home()

    def plans(self, inputs: Sequence[Inputs], draws: Draws, *, is_training: bool) -> list[Plan]:
        """Per micro-batch, what its stages do; none for a chain."""
        replica = self.replica if is_training else None
        replicas = [self.split] if replica is None else [self.split, replica.split]
        self.ranks.runtime.wait_for_late_ranks()  # they may still run what is refreshed
        if replica is not None:
            replica.follow()
        cuts = [made.cut for made in replicas if made.cut is not None]
        for cut in cuts:
            cut.refresh()
        if not cuts:
            return []
        which = [self.placement.replica_of(i, len(inputs)) if len(cuts) > 1 else 0 for i in range(len(inputs))]
        with torch.set_grad_enabled(is_training):
            return [cuts[which[i]].plan(each, draws(i)) for i, each in enumerate(inputs)]


def links_of(plans: Sequence[Plan]) -> Links:
    """Between which stages that are no neighbours something travels."""
    forward = {pair for plan in plans for pair in plan.forward_links}
    backward = {pair for plan in plans for pair in plan.backward_links}
    return Links(tuple(forward), tuple(backward))
