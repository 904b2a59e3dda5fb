"""What all ranks say to each other at one place of their program: small, and checked to be the same place.

A collective of torch.distributed takes whatever comes next, so ranks that have lost step exchange the wrong things, or
wait for ever. Here each message says which call it belongs to.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from pipeloom.errors import ProcessError
from pipeloom.peers import kinds
from pipeloom.peers.cause import Cause
from pipeloom.peers.failure import Failures
from pipeloom.peers.mesh import Mesh
from pipeloom.peers.waiting import Overdue, Patience

_HEADER = struct.Struct("<IIH")


class _Said(NamedTuple):
    what: str
    payload: bytes


class Collective:
    """Calls that all ranks make, in the same order, from one thread each.

    Args:
        mesh: not yet started.
        failures: end a wait.
        limit_s: how long to wait for the other ranks in one call.

    Attributes:
        on_stall: makes the cause when the limit is over, from the ranks that are waited for and what for.
        look: called every 5 s of waiting, to see whether there is any hope; it may raise.
        missing: the ranks that are waited for right now.
    """

    def __init__(self, mesh: Mesh, failures: Failures, limit_s: float) -> None:
        self._mesh, self._failures, self._limit_s = mesh, failures, limit_s
        self._epoch, self._number = 0, 0
        self.look: Callable[[], None] | None = None
        self.missing: list[int] = []
        self._queue: SimpleQueue[tuple[int, memoryview] | None] = SimpleQueue()
        self._said: defaultdict[tuple[int, int], dict[int, _Said]] = defaultdict(dict)
        self.on_stall: Callable[[list[int], str], Cause] = self._stalled
        mesh.on(kinds.GATHER, lambda peer, body: self._queue.put((peer, body)))
        failures.on_failure(lambda: self._queue.put(None))

    @property
    def epoch(self) -> int:
        """Counts up whenever all ranks begin anew after a failure: what was said before is dropped."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch, self._number = epoch, 0
        for key in [key for key in self._said if key[0] < epoch]:
            del self._said[key]

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        """Give every rank every rank's payload; collective, waits.

        Args:
            payload: this rank's.
            what: this is, for reports and to be checked: "the end of step 7".

        Returns:
            The payloads in rank order.

        Raises:
            PeerFailed: another rank failed, has ended, or did not come within the limit.
            ProcessError: the ranks are at different calls; raised on all of them.
        """
        key = (self._epoch, self._number)
        self._number += 1
        encoded = what.encode()
        self._mesh.broadcast(kinds.GATHER, _HEADER.pack(*key, len(encoded)), encoded, payload)
        said = self._said[key]
        said[self._mesh.rank] = _Said(what, payload)
        self._wait(key, what)
        self._failures.last_call = key
        del self._said[key]
        _check_same([said[rank].what for rank in range(self._mesh.num_ranks)])
        return [said[rank].payload for rank in range(self._mesh.num_ranks)]

    @property
    def has_unread(self) -> bool:
        """Whether this rank waits, and something has come that it has not read: it may be what it waits for."""
        return bool(self.missing) and not self._queue.empty()

    def _wait(self, key: tuple[int, int], what: str) -> None:
        patience = Patience(self._limit_s, self.look)
        try:
            while missing := self._missing(key, what):
                self.missing = missing
                try:
                    self._sort(patience.take(self._queue))
                except Overdue:
                    self._failures.tell(self.on_stall(missing, what))
                    self._failures.check()
                    raise
        finally:
            self.missing = []

    def _missing(self, key: tuple[int, int], what: str) -> list[int]:
        """Who has to be waited for. What a rank said before it failed or ended still counts: it is read after that.

        A rank that failed after this call has got everybody's part of it, and so will this one.
        """
        has_failed, ended, said = self._failures.cause is not None, set(self._failures.ended), self._said[key]
        left = ended.union(self._failures.gone)
        while not self._queue.empty():
            self._sort(self._queue.get())
        missing = [rank for rank in range(self._mesh.num_ranks) if rank not in said]
        is_broken = has_failed and not self._failures.is_after(key)
        if missing and (is_broken or left.intersection(missing)):
            self._failures.expect(ended.intersection(missing), what)
        return missing

    def _sort(self, arrived: tuple[int, memoryview] | None) -> None:
        if arrived is None:
            return
        peer, body = arrived
        epoch, number, num_bytes = _HEADER.unpack_from(body)
        if epoch >= self._epoch:
            end = _HEADER.size + num_bytes
            said = _Said(bytes(body[_HEADER.size : end]).decode(), bytes(body[end:]))
            self._said[epoch, number][peer] = said

    def _stalled(self, missing: list[int], what: str) -> Cause:
        names = ", ".join(map(str, missing))
        message = f"rank {self._mesh.rank} has waited {self._limit_s:g} s for {what} from rank {names}"
        return Cause(missing[0], "stalled", "at an unknown place", message)


def _check_same(whats: list[str]) -> None:
    for rank, what in enumerate(whats):
        if what != whats[0]:
            raise ProcessError(
                f"the ranks are at different places: rank 0 is at {whats[0]!r}, rank {rank} at {what!r}",
                "every rank has to make the same calls on its pipeline, in the same order",
            )
