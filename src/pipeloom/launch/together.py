"""The processes of one run before they have a pipeline: who they are, and how all of them find the same.

Each rank could read the configuration, look for the newest run and make a folder's name by itself; then two clocks, or
two disks, make two runs of one. And what is wrong is found by every rank, and said as often. Here the first rank
decides what depends on time and place, and one rank's fault is everybody's, said by one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pipeloom.archive.group import Alone, Group
from pipeloom.errors import PeerFailed, PipeloomError, ProcessError, SaidElsewhere

LIMIT_S: Final = 600.0
_LEAVE_S: Final = 10.0
_POLL_S: Final = (0.001, 0.05)
_RUN: Final = "pipeloom/run"


class Store(Protocol):
    """What is used of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str | bytes) -> None:
        """Put a value."""

    def get(self, key: str) -> bytes:
        """Return a value; wait until it is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


@dataclass
class Job:
    """The processes that a launcher started together, by the store that it gave them; a `Group`.

    Args:
        store: of the launcher: what is put there survives the processes.
        rank: this process.
        num_ranks: how many there are.
        attempt: how often the launcher started them before.
        limit_s: how long to wait for the others.
    """

    store: Store
    rank: int
    num_ranks: int
    attempt: int = 0
    limit_s: float = LIMIT_S
    _number: int = 0

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        """Return every rank's payload, in the order of ranks.

        Raises:
            ProcessError: a rank did not come within the limit, or came to something else.
        """
        self._number += 1
        keys = [f"pipeloom/start/{self.attempt}/{self._number}/{rank}" for rank in range(self.num_ranks)]
        self.store.set(keys[self.rank], what.encode() + b"\0" + payload)
        self._wait(keys, what, self.limit_s)
        said = [self.store.get(key).partition(b"\0") for key in keys]
        for rank, (theirs, _, _) in enumerate(said):
            if theirs != what.encode():
                raise ProcessError(
                    f"the ranks are at different places: rank {self.rank} is at {what!r}, rank {rank} at "
                    f"{theirs.decode()!r}",
                    "start every process with the same program, options and environment",
                )
        return [payload for _, _, payload in said]

    def leave(self) -> None:
        """Before all ranks end: the first one, which may hold the store, goes last."""
        keys = [f"pipeloom/end/{self.attempt}/{rank}" for rank in range(self.num_ranks)]
        self.store.set(keys[self.rank], "")
        if self.rank == 0:
            with contextlib.suppress(ProcessError):
                self._wait(keys, "the end", min(self.limit_s, _LEAVE_S))

    def remember(self, value: Any) -> None:
        """Keep a value for the attempts that come after this one; the first rank's counts."""
        if self.rank == 0:
            self.store.set(_RUN, json.dumps(value))

    def remembered(self) -> Any:
        """What an earlier attempt has kept, or None."""
        return json.loads(self.store.get(_RUN)) if self.store.check([_RUN]) else None

    def _wait(self, keys: list[str], what: str, limit_s: float) -> None:
        # Asked again and again: neither a signal nor our limit could end a `get` that waits.
        pause_s, until_s = _POLL_S[0], time.monotonic() + limit_s
        while not self.store.check(keys):
            if time.monotonic() > until_s:
                missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not self.store.check([key]))
                raise ProcessError(
                    f"rank {self.rank} of {self.num_ranks} waited {limit_s:g} s for {what} from rank {missing}",
                    "start the same command once for every rank; their own output says whether they failed before",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])


class NoJob(Alone):
    """One process that nobody started again, with the face of a `Job`."""

    def remember(self, value: Any) -> None:
        """Nobody comes after it."""

    def remembered(self) -> Any:
        """Nobody came before it."""
        return None


def num_started(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many processes a launcher has started together with this one; None without a launcher."""
    return int(environment.get("WORLD_SIZE", "1")) if "RANK" in environment else None


def find_job(environment: Mapping[str, str] = os.environ) -> Job | NoJob:
    """Return the processes that torchrun, or `pipeloom train --launch`, started together with this one.

    Raises:
        ProcessError: the environment names several processes, but not where they meet.
    """
    num_processes = num_started(environment)
    if num_processes is None or (num_processes < 2 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"):
        return NoJob()
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, num_ranks = next(iter(rendezvous("env://")))
    except ValueError as error:
        raise ProcessError(
            f"WORLD_SIZE is {num_processes}, but the processes do not find each other: {error}",
            "start them with `pipeloom train --launch N`, or with torchrun",
        ) from None
    return Job(store, rank, num_ranks, int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")))


def gathered(group: Group, what: str, make: Callable[[], Any]) -> list[Any]:
    """Return what every rank makes, as JSON can hold it, in the order of ranks; collective.

    Raises:
        PipeloomError: what ``make`` raised here.
        SaidElsewhere: ``make`` raised on a lower rank.
    """
    value, error = None, None
    try:
        value = make()
    except PeerFailed:
        raise
    except PipeloomError as raised:
        error = raised
    said = [None, value] if error is None else [[error.message, error.hint], None]
    everyones = [json.loads(each) for each in group.all_gather(json.dumps(said).encode(), what)]
    failed = [rank for rank, (fault, _) in enumerate(everyones) if fault is not None]
    if not failed:
        return [found for _, found in everyones]
    speaks = error if group.rank == failed[0] else None
    if speaks is not None:
        _be_left_alone(group)
    if isinstance(group, Job):
        group.leave()
    if speaks is not None:
        raise speaks
    message, hint = everyones[failed[0]][0]
    raise SaidElsewhere(f"rank {failed[0]}: {message}", hint) from error


def from_first(group: Group, what: str, make: Callable[[], Any]) -> Any:
    """Return on every rank what the first one makes, as JSON can hold it; collective.

    Raises:
        PipeloomError: what ``make`` raised; on the other ranks it is `SaidElsewhere`.
    """
    return gathered(group, what, lambda: make() if group.rank == 0 else None)[0]


def together(group: Group, what: str, do: Callable[[], Any]) -> Any:
    """Do something on every rank, or fail on every rank; collective. Returns what ``do`` returned here.

    Raises:
        PipeloomError: what ``do`` raised here.
        SaidElsewhere: ``do`` raised on a lower rank.
    """
    found: list[Any] = []
    gathered(group, what, lambda: found.append(do()))
    return found[0]


def _be_left_alone(group: Group) -> None:
    """A launcher ends the others when the first one has ended; who has to say why must not be among them."""
    if group.num_ranks > 1 and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
