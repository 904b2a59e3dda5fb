"""Where the stages of a pipeline run: all in this process, or those of one rank here and the others elsewhere."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pipeloom.batch.losses import LossRule
from pipeloom.errors import ProcessError, SplitError, UnsupportedShape
from pipeloom.processes import Company, DistributedRuntime, World
from pipeloom.programs import Programs
from pipeloom.runtime.local import LocalRuntime
from pipeloom.runtime.replicas import Second
from pipeloom.runtime.selective import RunAgain
from pipeloom.runtime.stage import Stage
from pipeloom.splitting import Replica, Share, Split, Ties
from pipeloom.splitting.named import named

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
    replica: Replica | None,
    programs: Programs,
    rule: LossRule,
    company: Company | None,
    devices: Devices | None,
) -> Ranks:
    """Put the stages where they run.

    Args:
        made: the cut model.
        ties: its tied weights.
        replica: the second one, where the placement has two.
        programs: of the pipeline.
        rule: its loss, which may hold weights.
        company: the processes that are ranks; None: ranks are threads.
        devices: one per rank; None leaves the model where it is.

    Raises:
        UnsupportedShape: there are not as many devices as ranks.
        SplitError: the loss uses a weight that will be in another process.
        ProcessError: there are not as many processes as ranks, or they do not find each other.
    """
    num_ranks = programs.placement.num_ranks
    places = None if devices is None else _checked(devices, num_ranks)
    if company is None:
        here = range(made.num_stages)
        where = places or [None] * num_ranks
        stages = _stages(here, made, programs, where)
        runtime = LocalRuntime(list(stages.values()), programs.placement, _second(replica, here, programs, where))
        return Ranks(frozenset(here), Share(made, ties, here), runtime)
    world = company.world
    if world.num_ranks != num_ranks:
        raise _other_number(world, programs)
    _check_loss(made, ties, rule)
    return _as_process(company, made, ties, replica, programs, places or [world.device] * num_ranks)


def _as_process(
    company: Company,
    made: Split,
    ties: Ties,
    replica: Replica | None,
    programs: Programs,
    places: Sequence[torch.device | None],
) -> Ranks:
    placement = programs.placement
    here = placement.stages_of(company.world.rank, 0)
    share = Share(made, ties, here)
    channels = _channels(made, programs)
    _again(made, programs)  # a wrong name is refused while the model is whole
    try:
        company.compare(_facts(made, programs), _weights(made))
    except BaseException:
        ties.undo()  # the model as it was found: this may be tried again
        raise
    closing: Company | DistributedRuntime = company
    try:  # from here on the model is not whole any more
        share.release()
        there = placement.stages_of(company.world.rank, 1) if replica else ()
        if replica is not None:
            replica.free(there)
        stages = _stages(here, made, programs, places)
        second = _second(replica, there, programs, places)
        has_ties = any(ties.crossing(placement.stages_of(rank, 0)) for rank in range(placement.num_ranks))
        closing = runtime = DistributedRuntime(
            company, stages, placement, channels, ties.crossing(here), second, has_ties=has_ties
        )
        runtime.meet()
    except BaseException as error:
        closing.close_after(error)
        raise
    return Ranks(frozenset(here), share, runtime)


def _channels(made: Split, programs: Programs) -> frozenset[tuple[int, int]]:
    """Between ranks that send to each other; without a chain that may change with the inputs, so between all."""
    if made.cut is None:
        return programs.training(programs.checked(None)).channels
    ranks = range(programs.placement.num_ranks)
    return frozenset((one, other) for one in ranks for other in ranks if one != other)


def _facts(made: Split, programs: Programs) -> dict[str, str]:
    """What must be the same in all processes."""
    shapes = [(name, tuple(each.shape), str(each.dtype)) for name, each in made.root.named_parameters()]
    cuts = [[unit.name for unit in units] for units in made.stages]
    return {
        "torch": torch.__version__,
        "the placement": str((programs.placement.ranks, programs.placement.opposed)),
        "where the model is cut": str(cuts),
        "recompute": str([*sorted(programs.recomputed), *programs.recomputed_names]),
        "the model (a checksum of its names and shapes)": f"{zlib.crc32(str(shapes).encode()):08x}",
    }


def _weights(made: Split) -> str:
    """A checksum of some numbers of every weight, to tell models apart that were initialised differently."""
    checksum = 0
    if any(each.is_meta for each in made.root.parameters()):
        return ""  # read from the same files
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


def _second(
    replica: Replica | None, here: Iterable[int], programs: Programs, places: Sequence[torch.device | None]
) -> Second | None:
    return None if replica is None else Second(_stages(here, replica.split, programs, places, replica=1), replica)


def _stages(
    here: Iterable[int],
    made: Split,
    programs: Programs,
    places: Sequence[torch.device | None],
    replica: int = 0,
) -> dict[int, Stage]:
    again = _again(made, programs)
    return {index: _stage(index, made, places[programs.placement.rank_of(index, replica)], again) for index in here}


def _again(made: Split, programs: Programs) -> list[list[RunAgain]]:
    """Per stage, the modules that run again in the backward; what several places share is one."""
    known: dict[int, RunAgain] = {}
    return [
        list(dict.fromkeys(known.setdefault(id(module), RunAgain(name, module)) for name, module in stage))
        for stage in named(made, programs.recomputed_names, "recompute")
    ]


def _stage(index: int, made: Split, device: torch.device | None, again: Sequence[Sequence[RunAgain]]) -> Stage:
    cut = made.cut
    return Stage(
        index,
        made.stages[index],
        device=device,
        part=None if cut is None else cut.part(index, device),
        parents=None if cut is None else cut.parents(index),
        again=again[index],
    )


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
