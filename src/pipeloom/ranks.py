"""Where the stages of a pipeline run: all in this process, or those of one rank here and the others elsewhere."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeloom.batch.losses import LossRule
from pipeloom.errors import ProcessError, SplitError, UnsupportedShape
from pipeloom.processes import DistributedRuntime, TransportName, World, find_world
from pipeloom.programs import Programs
from pipeloom.runtime.local import LocalRuntime
from pipeloom.runtime.stage import Stage
from pipeloom.splitting import Share, Split, Ties

Devices = Sequence[torch.device | str | int]


@dataclass(frozen=True)
class Ranks:
    """What of a pipeline is in this process.

    Args:
        stages: the indices of the stages that are here.
        share: their part of the model.
        runtime: runs them.
    """

    stages: frozenset[int]
    share: Share
    runtime: LocalRuntime | DistributedRuntime


def place(
    made: Split,
    ties: Ties,
    programs: Programs,
    rule: LossRule,
    transport: TransportName,
    devices: Devices | None,
    limit_s: float,
) -> Ranks:
    """Put the stages where they run.

    Args:
        made: the cut model.
        ties: its tied weights.
        programs: of the pipeline.
        rule: its loss, which may hold weights.
        transport: threads or processes.
        devices: one per rank; None leaves the model where it is.
        limit_s: how long a process waits for another.

    Raises:
        UnsupportedShape: there are not as many devices as ranks.
        SplitError: the loss uses a weight that will be in another process.
        ProcessError: there are not as many processes as ranks, or they do not find each other.
    """
    world, num_ranks = find_world(transport), programs.placement.num_ranks
    places = None if devices is None else _checked(devices, num_ranks)
    if world is None:
        here = range(made.num_stages)
        stages = [_stage(index, made, programs, places or [None] * num_ranks) for index in here]
        return Ranks(frozenset(here), Share(made, ties, here), LocalRuntime(stages, programs.placement))
    if world.num_ranks != num_ranks:
        raise _other_number(world, programs)
    _check_loss(made, ties, rule)
    return _as_process(world, made, ties, programs, places or [world.device] * num_ranks, limit_s)


def _as_process(
    world: World,
    made: Split,
    ties: Ties,
    programs: Programs,
    places: Sequence[torch.device | None],
    limit_s: float,
) -> Ranks:
    placement = programs.placement
    here = placement.stages_of(world.rank)
    share = Share(made, ties, here)
    facts, weights = _facts(made, programs), _weights(made)
    share.release()
    stages = {index: _stage(index, made, programs, places) for index in here}
    channels = programs.training(programs.checked(None)).channels
    has_ties = any(ties.crossing(placement.stages_of(rank)) for rank in range(world.num_ranks))
    runtime = DistributedRuntime(world, stages, placement, channels, ties.crossing(here), limit_s, has_ties=has_ties)
    try:
        runtime.meet(facts, weights)
    except BaseException as error:
        runtime.close_after(error)
        raise
    return Ranks(frozenset(here), share, runtime)


def _facts(made: Split, programs: Programs) -> dict[str, str]:
    """What must be the same in all processes."""
    shapes = [(name, tuple(each.shape), str(each.dtype)) for name, each in made.root.named_parameters()]
    cuts = [[unit.name for unit in units] for units in made.stages]
    return {
        "torch": torch.__version__,
        "the placement": str(programs.placement.ranks),
        "where the model is cut": str(cuts),
        "recompute": str(sorted(programs.recomputed)),
        "the model (a checksum of its names and shapes)": f"{zlib.crc32(str(shapes).encode()):08x}",
    }


def _weights(made: Split) -> str:
    """A checksum of some numbers of every weight, to tell models apart that were initialised differently."""
    checksum = 0
    for parameter in made.root.parameters():
        if parameter.device.type == "cpu" and parameter.layout is torch.strided and parameter.numel():
            corner = parameter.detach().flatten()[:4].resolve_conj().resolve_neg().contiguous()
            checksum = zlib.crc32(corner.view(torch.uint8).numpy().tobytes(), checksum)
    return f"{checksum:08x}"


def _check_loss(made: Split, ties: Ties, rule: LossRule) -> None:
    last = {id(each) for unit in made.stages[-1] for each in unit.module.parameters()}
    whole = {id(each): name for name, each in made.root.named_parameters()}
    for each in rule.parameters:
        if id(each) in whole and id(each) not in last and not ties.is_copy(each):
            raise SplitError(
                f"the loss function uses {whole[id(each)]!r}, a weight of an earlier stage, which is in another "
                "process",
                "make it a module that holds the weight, loss_fn.weight = layer.weight: then it is tied to it",
            )


def check_num_ranks(given: int | None, num_ranks: int) -> None:
    """Compare what the user expects with what the schedule needs.

    Raises:
        UnsupportedShape: they differ.
    """
    if given is not None and given != num_ranks:
        raise UnsupportedShape(
            f"num_ranks={given} was given, but the schedule puts the stages on {num_ranks} ranks",
            "leave num_ranks out, or give as many stages as ranks",
        )


def _stage(index: int, made: Split, programs: Programs, places: Sequence[torch.device | None]) -> Stage:
    device, has_recompute = places[programs.placement.rank_of(index)], index in programs.recomputed
    return Stage(index, made.stages[index], device=device, has_recompute=has_recompute)


def _other_number(world: World, programs: Programs) -> ProcessError:
    num_stages, num_ranks = programs.placement.num_stages, programs.placement.num_ranks
    return ProcessError(
        f"there are {world.num_ranks} processes, but the schedule puts {num_stages} stages on {num_ranks} ranks; each "
        "rank is one process",
        f"start {num_ranks} processes, cut the model for {world.num_ranks} ranks, or run all ranks as threads of each "
        "process with transport='local'",
    )


def _checked(given: Devices, num_ranks: int) -> list[torch.device | None]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UnsupportedShape(f"devices={given!r} was given; a list with one device for each rank is needed")
    if len(given) != num_ranks:
        raise UnsupportedShape(f"{len(given)} devices were given for {num_ranks} ranks; each needs one")
    try:
        return [torch.device(each) for each in given]
    except (RuntimeError, TypeError):
        raise UnsupportedShape(
            f"devices={list(given)} were given; each must be a torch.device, or what makes one, as 'cuda:0'"
        ) from None
