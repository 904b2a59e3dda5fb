"""The processes of one pipeline, connected from the first line of its constructor on.

A rank may fail while it makes its model, or cuts it, which takes as long as a model is big. Connections that came only
after that left the others waiting for a rank that never came, with nobody to say why. So these come first, and all
that may fail on one rank alone is done under them.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from pipeloom.errors import PeerFailed, ProcessError, RuntimeStateError
from pipeloom.peers import Collective, Ending, Failures, Mesh, Rendezvous, Stalls, local_host
from pipeloom.processes.meeting import check_alike
from pipeloom.processes.whereabouts import Whereabouts
from pipeloom.processes.world import TransportName, World, find_world, not_connected

_UNTIL_NEWS_S = 1.0
_PAUSE_S = 0.01


class Company:
    """Who is there, and what any of them failed of.

    Args:
        world: the processes.
        limit_s: how long to wait for another rank before that is called a stall.

    Attributes:
        world: the processes.
        limit_s: that limit.
        mesh: their connections, read by a thread.
        failures: what is known of failures.
        stalls: who keeps everybody waiting.
        where: this rank is.
        collective: what all ranks say to each other.
        ending: of this process.

    Raises:
        PeerFailed: an earlier pipeline of this process has heard that a process is gone.
        ProcessError: the processes do not find each other.
    """

    def __init__(self, world: World, limit_s: float) -> None:
        self.world, self.limit_s = world, limit_s
        self._pid, self._is_closed = os.getpid(), False
        self.mesh = mesh = _connected(world, limit_s)
        self.where = where = Whereabouts(world.rank, world.num_ranks)
        self.failures = failures = Failures(mesh, where.of)
        self.stalls = stalls = Stalls(mesh, failures, where.state)
        self.collective = where.collective = Collective(mesh, failures, limit_s)
        self.collective.on_stall = lambda _, what: stalls.cause(what, limit_s)
        self.look: Callable[[], None] = partial(_look_for_a_deadlock, stalls, failures)
        self.collective.look = self.look
        self.ending = Ending(mesh, failures)
        self._let_go = weakref.finalize(self, self.ending.close)
        _LIVING.add(self)
        mesh.start()

    def compare(self, facts: Mapping[str, str], weights: str) -> None:
        """Compare what must be the same on all ranks, once it is known how the model is cut; raises what `check_alike`
        does. Nobody gets past this before all came to it, so whoever fails until here may try again.
        """
        check_alike(self.world.rank, facts, weights, self.all_gather)

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        """Every rank's payload, in rank order; all ranks have to call it, and it waits for them."""
        self.check_usable()
        self.where.since_s = time.monotonic()
        return self.collective.all_gather(payload, what)

    def connect_again(self, purpose: str) -> dict[int, Any]:
        """More connections between all ranks, which nobody reads; collective."""
        world = self.world
        again = Rendezvous(
            PrefixStore(purpose, world.store), world.rank, world.num_ranks, self.limit_s, self.failures.check
        )
        with self.hearing():
            return again.connect(local_host())

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """Around what needs other ranks, but hears nothing of them: the store, and torch's groups.

        Raises:
            PeerFailed: it failed because another rank has.
            ProcessError: it failed by itself.
        """
        try:
            yield
        except PeerFailed:
            raise
        except (ProcessError, RuntimeError) as error:
            until = time.monotonic() + _UNTIL_NEWS_S
            while self.failures.cause is None and time.monotonic() < until:
                time.sleep(_PAUSE_S)
            self.failures.check()
            raise not_connected(error) from error

    def tell(self, error: BaseException) -> None:
        """Tell the others what failed here before all have met, unless they know. Nobody gets past `compare` then, so
        all ranks call this, and may try again.
        """
        try:
            if not isinstance(error, PeerFailed):
                self.failures.report(error)
        finally:
            self.collective.epoch += 1
            self.leave()
            self.where.is_inside = True  # of the start, still

    def leave(self) -> None:
        """A call has ended, on all ranks and alike; what went wrong in it is no matter of the next. Deaths remain."""
        self.where.is_inside = False
        if not self.failures.gone:
            self.failures.forget()

    def check_usable(self) -> None:
        """Go on if there are connections, and they are this process's.

        Raises:
            RuntimeStateError: they are closed, or a parent's.
        """
        if self._is_closed:
            raise RuntimeStateError(
                "the pipeline is closed, and so are its connections to the other processes",
                "do what needs all ranks (full_state_dict, unwrap, clip_grad_norm_) before close(), or inside `with`",
            )
        if os.getpid() != self._pid:
            raise RuntimeStateError(
                "a pipeline whose ranks are processes was used in a child that one of them forked; its connections are "
                "the parent's",
                "use it in the process that made it; let workers of a data loader read data only",
            )

    def close_after(self, error: BaseException | None) -> None:
        """Say good-bye, or why if an exception of this rank's user is the reason, and close the connections."""
        self._is_closed = True
        self._let_go.detach()
        self.ending.close(error)


_LIVING: weakref.WeakSet[Company] = weakref.WeakSet()


def join(transport: TransportName, limit_s: float) -> Company | None:
    """Connect the processes that this one belongs to; None if the ranks are threads of it. Collective.

    Raises:
        PeerFailed: one of them is gone.
        ProcessError: what `find_world` says, or they do not find each other within the limit.
    """
    world = find_world(transport, limit_s)
    if world is None:
        return None
    company = Company(world, limit_s)
    company.all_gather(b"", "the connections")  # who goes on alone may be gone before others could hear of it
    return company


def _connected(world: World, limit_s: float) -> Mesh:
    host = local_host()
    try:
        return Mesh.connect(
            world.store, world.rank, world.num_ranks, host=host, timeout_s=limit_s, look=_look_at_others
        )
    except RuntimeError as error:
        raise not_connected(error) from error


def _look_at_others() -> None:
    """While this rank waits for all to come to a new pipeline: an earlier one hears who never will."""
    for each in list(_LIVING):
        if each.failures.gone:
            each.failures.check()


def _look_for_a_deadlock(stalls: Stalls, failures: Failures) -> None:
    cause = stalls.deadlock()
    if cause is not None:
        failures.tell(cause)
        failures.check()
