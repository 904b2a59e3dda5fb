"""Which processes make up a pipeline, and how they find each other.

The same file runs in a notebook and under torchrun: whoever started the processes has said so in the environment.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pipeloom.errors import PeerFailed, PipeloomError, ProcessError
from pipeloom.peers import Cause, Rendezvous

TransportName = Literal["auto", "local", "distributed"]
_numbers = itertools.count()


@dataclass(frozen=True)
class World:
    """The processes of a pipeline.

    Args:
        rank: of this process in the pipeline.
        global_ranks: per rank of the pipeline, its rank in torch.distributed.
        backend: "gloo" or "nccl".
        device: where this rank's stages live; None leaves them where they are.
        store: for the ranks of this pipeline alone.
    """

    rank: int
    global_ranks: Sequence[int]
    backend: str
    device: torch.device | None
    store: Any

    @property
    def num_ranks(self) -> int:
        """How many processes there are."""
        return len(self.global_ranks)


def find_world(transport: TransportName, limit_s: float = 600.0) -> World | None:
    """The processes that this one belongs to; None if the ranks are threads of it.

    Args:
        transport: "auto": processes if a process group of several exists, or torchrun has started several; "local" and
            "distributed" say it.
        limit_s: how long the processes may take to come.

    Raises:
        ProcessError: "distributed" was asked for, and there is nothing of the kind; or some do not come.
    """
    if transport == "local":
        return None
    if not _is_initialised() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        _initialise(limit_s)
    num_processes = dist.get_world_size() if _is_initialised() else 1
    if transport == "distributed" and num_processes < 2:
        raise ProcessError(
            f"transport='distributed' was given, but there is {num_processes} process; a rank needs one each",
            "start it with: torchrun --nproc-per-node NUM_RANKS your_script.py",
        )
    return _world() if num_processes > 1 else None


def _is_initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _initialise(limit_s: float) -> None:
    """As `dist.init_process_group` does, but each attempt of an elastic launcher starts from an empty store.

    The launcher's store keeps the addresses of the attempt before, and gloo waits for those who are dead
    (pytorch #135957, #135712; seen with torch 2.13). Drop this when torch does the like itself.

    And it begins when all have come: who waits in it can neither be told nor told to stop.
    """
    backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= _num_local() else "gloo"
    num_processes, limit = int(os.environ["WORLD_SIZE"]), timedelta(seconds=limit_s)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        # As if there were one: else the process that keeps the store waits in here until all have connected to it.
        store, rank, _ = next(iter(rendezvous("env://", int(os.environ["RANK"]), 1, timeout=limit)))
        store.set_timeout(default_pg_timeout)
        own = PrefixStore(f"pipeloom/attempt_{attempt}", store)
        Rendezvous(PrefixStore("pipeloom", own), rank, num_processes, limit_s).arrive()
        dist.init_process_group(backend, store=own, rank=rank, world_size=num_processes)
    except dist.DistError as error:
        raise not_connected(error) from error


def not_connected(error: RuntimeError) -> PipeloomError:
    """What to raise because torch's store failed: who keeps it may be gone, and there may be nobody else to say so."""
    is_lost = isinstance(error, dist.DistNetworkError) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if isinstance(error, PipeloomError):
        return error
    rank = os.environ.get("RANK")
    if is_lost and rank != "0":
        cause = Cause(0, "lost", "the start", f"rank 0, who keeps the store of all ranks, can't be reached: {error}")
        return PeerFailed(f"rank {rank} stops, because rank {cause.rank} failed\n\n{cause}", cause=cause)
    return ProcessError(
        f"torch.distributed failed to bring the processes together: {error}",
        "its store is kept by rank 0, or by torchrun: their own output says whether they failed before",
    )


def _num_local() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _backend() -> str:
    """What carries tensors in the default group: one that was made without saying has gloo for CPUs, NCCL for GPUs."""
    name = str(dist.get_backend())
    if name in ("gloo", "nccl"):
        return name
    known = str(dist.get_backend_config())
    if "nccl" in known and torch.cuda.is_available():
        return "nccl"
    if "gloo" in known:
        return "gloo"
    raise ProcessError(
        f"the process group's backend is {name!r} ({known}); a pipeline's ranks need gloo or nccl",
        'make it with torch.distributed.init_process_group("gloo"), or let Pipeline make it',
    )


def _world() -> World:
    backend = _backend()
    is_on_gpu = backend == "nccl"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank()))) if is_on_gpu else None
    # Private: what the group was made with, whoever made it. Ranks make their pipelines in the same order.
    store = dist.distributed_c10d._get_default_store()
    number = f"pipeloom/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_numbers)}"
    ranks = range(dist.get_world_size())
    return World(dist.get_rank(), ranks, backend, device, PrefixStore(number, store))
