"""Why a pipeline fails: one cause, the same on every rank.

When a rank fails, the others fail soon after, of something else: a connection that closes, a message that does not
come. What they would report is true and of no use. So the first cause goes to everybody, ahead of all its consequences:
who learns of it hands it on *before* it ends, on the same connection that will close. A connection that closes without
any such word is a death that explains the rest.

What several ranks notice at once, each tells in its own words, and these cross on their way. So nothing is raised
before the words have settled: within that time the one that comes first in an order takes the place of others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from pipeloom.errors import PeerFailed
from pipeloom.peers import kinds
from pipeloom.peers.cause import Cause, Claim
from pipeloom.peers.mesh import Mesh

_SETTLE_S = 0.2
_REPORTED = "_pipeloom_cause"
"""Under which name an exception has the cause that it was reported as."""


class Failures:
    """What this rank knows of failures, its own and those of others.

    Args:
        mesh: not yet started.
        where: gives the place of a rank that can't say it any more; called in the thread of connections.

    Attributes:
        ended: the ranks that have ended in good order, or closed their pipeline.
        gone: the ranks whose process is lost, or ends because of an exception that nobody caught; with its last words.
        last_call: of those that all ranks make together, the last one that this rank is through; its collective's.
        raised_at_s: when the cause reached the code of this rank's user (`time.monotonic`); None if it has not.
    """

    def __init__(self, mesh: Mesh, where: Callable[[int], str]) -> None:
        self._mesh, self._where = mesh, where
        self._lock = threading.RLock()
        self._wakes: list[Callable[[], None]] = []
        self._death_handlers: list[Callable[[], None]] = []
        self._epoch = 0
        self._claim: Claim | None = None
        self._known_at_s = 0.0
        self._ahead: list[Claim] = []
        self._explained: set[int] = set()
        self.ended: set[int] = set()
        self.gone: dict[int, Cause | None] = {}
        self.last_call = (-1, -1)
        self.raised_at_s: float | None = None
        mesh.on(kinds.CAUSE, self._hear)
        mesh.on(kinds.BYE, self._hear_bye)
        mesh.on_lost(self._lose)

    @property
    def cause(self) -> Cause | None:
        """The one that holds, if there is one."""
        claim = self._claim
        return None if claim is None else claim.cause

    def is_after(self, call: tuple[int, int]) -> bool:
        """Whether the cause came when its teller was through a call that all ranks make together."""
        claim = self._claim
        return claim is not None and claim.last_call >= call

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is known that could end a wait."""
        return self._claim is None and not self.ended

    @property
    def death(self) -> Cause | None:
        """The cause that a process is gone, if one is."""
        if not self.gone:
            return None
        rank, last_words = min(self.gone.items())
        return last_words or self._lost(rank)

    def on_failure(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when a cause becomes known, and when a peer ends: whoever waits should check again.

        It is called in any thread, at once if a cause is known, and may be called for nothing.
        """
        self._wakes.append(wake)
        if self.cause is not None or self.ended:
            wake()

    def on_death(self, handler: Callable[[], None]) -> None:
        """Call ``handler``, in the mesh's thread, when another process is gone and its cause is known here."""
        self._death_handlers.append(handler)

    def tell(self, cause: Cause) -> Cause:
        """Make a cause known to every rank, unless one is known already; return the one that holds everywhere.

        Takes 0.2 s, until what others tell at the same time is here. If another cause holds than this rank's own
        exception, `check` raises it.
        """
        with self._lock:
            if self._claim is None:
                self._adopt(Claim(cause, self._mesh.rank, self._epoch, self.last_call))
        return self._settled().cause

    def report(self, error: BaseException) -> Cause:
        """Tell what this rank's user raised, once however often it is reported; return the cause that holds."""
        known = getattr(error, "cause", None) if isinstance(error, PeerFailed) else vars(error).get(_REPORTED)
        if isinstance(known, Cause):
            return known
        cause = self.tell(Cause.of(self._mesh.rank, self._where(self._mesh.rank), error))
        vars(error)[_REPORTED] = cause  # it passes several places on its way out, and may be forgotten in between
        return cause

    def say_last_words(self, cause: Cause) -> None:
        """Tell every rank that this process ends, and why."""
        self._broadcast(Claim(cause, self._mesh.rank, self._epoch, self.last_call, is_dying=True))

    def check(self) -> None:
        """Go on if no other rank has failed: costs one look at an attribute.

        Raises:
            PeerFailed: there is a cause, and it is not an exception that this rank itself told.
        """
        if self._claim is not None:
            self._raise()

    def expect(self, peers: Collection[int], what: str) -> None:
        """Go on if those of whom something is still expected are there.

        Args:
            peers: who must not have ended.
            what: is waited for: "the end of step 7".

        Raises:
            PeerFailed: there is a cause, or one of the peers has ended; then all ranks are told.
        """
        self.check()
        if self.ended and (early := self.ended.intersection(peers)):
            rank = min(early)
            message = (
                f"rank {rank} ended (or closed its pipeline) while rank {self._mesh.rank} waits for {what}: "
                "the ranks do not run the same number of steps"
            )
            self.tell(Cause(rank, "ended", "outside a step", message))
            self._raise()

    def forget(self) -> None:
        """Begin a call, after a failure that was undone on all ranks or without one; each rank calls this as often as
        the others. What ranks tell that have begun a later call waits for this one to begin it too.

        Who is gone stays gone: then there is a cause afterwards too.
        """
        with self._lock:
            self._epoch += 1
            self._claim, self.raised_at_s = None, None
            self._explained.clear()
            ahead, self._ahead = self._ahead, []
            if death := self.death:
                self._adopt(Claim(death, self._mesh.rank, self._epoch))
            for claim in ahead:
                self._sort(claim)

    def _raise(self) -> None:
        claim = self._settled()
        if claim.cause.rank == self._mesh.rank and claim.cause.kind == "exception":  # whoever passed it on last
            return
        cause = claim.cause
        raise PeerFailed(f"rank {self._mesh.rank} stops, because rank {cause.rank} failed\n\n{cause}", cause=cause)

    def _settled(self) -> Claim:
        """The claim that holds once none can take its place; from here on it is raised."""
        while (left_s := self._known_at_s + _SETTLE_S - time.monotonic()) > 0:
            time.sleep(left_s)
        if self.raised_at_s is None:
            self.raised_at_s = time.monotonic()
        assert self._claim is not None, "only `forget` takes a claim away, in the thread that asks"
        return self._claim

    def _sort(self, claim: Claim) -> None:
        if claim.is_dying or claim.epoch == self._epoch:
            self._adopt(claim)
        elif claim.epoch > self._epoch:
            self._ahead.append(claim)

    def _adopt(self, claim: Claim) -> None:
        """Hold a claim if none is held, hand it on, and wake whoever waits; or let it take another one's place."""
        if self._claim is None:
            self._broadcast(replace(claim, is_dying=False))  # first: whoever knows it may end at once
            self._known_at_s = time.monotonic()
            self._claim = claim
            self._wake()
        elif claim.order < self._claim.order and time.monotonic() < self._known_at_s + _SETTLE_S:
            self._claim = claim
            if claim.teller == self._mesh.rank:
                self._broadcast(claim)

    def _broadcast(self, claim: Claim) -> None:
        self._mesh.broadcast(kinds.CAUSE, claim.encode())

    def _wake(self) -> None:
        for wake in list(self._wakes):
            wake()

    def _hear(self, peer: int, body: memoryview) -> None:
        claim = Claim.decode(body)
        with self._lock:
            if claim.is_dying or claim.epoch >= self._epoch:
                self._explained.add(peer)
            if claim.is_dying:
                self.gone[peer] = claim.cause
            self._sort(claim)
        if claim.is_dying:
            self._report_death()

    def _hear_bye(self, peer: int, _: memoryview) -> None:
        self.ended.add(peer)
        self._wake()

    def _lose(self, peer: int) -> None:
        """A connection has closed: in good order, or by a death that was explained, or by one that explains."""
        if peer in self.gone or peer in self.ended:
            return
        with self._lock:
            self.gone[peer] = None
            if self._claim is None or peer not in self._explained:
                self._adopt(Claim(self._lost(peer), self._mesh.rank, self._epoch))
        self._report_death()

    def _lost(self, rank: int) -> Cause:
        how = "its process ended without a word" if rank != self._mesh.rank else "its thread of connections has failed"
        return Cause(rank, "lost", self._where(rank), f"{self._mesh.names[rank]} is gone: {how}")

    def _report_death(self) -> None:
        for handler in self._death_handlers:
            handler()
