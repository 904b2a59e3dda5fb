"""Why a pipeline fails: one cause, the same on every rank.

When a rank fails, the others fail soon after, of something else: a connection that closes, a message that does not
come. What they would report is true and of no use. So the first cause goes to everybody, ahead of all its
consequences: who learns of it hands it on *before* it ends, on the same connection that will close. A
connection that closes without a word is then a death of its own.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipeloom.errors import PeerFailed
from pipeloom.peers import kinds
from pipeloom.peers.mesh import Mesh

_ECHO_S = 0.1
"""How long an exception waits for the news that it is only the echo of a death: sockets of a dying process close
one after another."""
_TURN_S, _LONGEST_TURN_S = 0.05, 0.5
"""What all ranks notice at once, each in words of its own, the lowest tells: the others wait a turn for each rank."""


@dataclass(frozen=True)
class Cause:
    """What went wrong, where.

    Args:
        rank: who it happened to.
        kind: it raised, its process is gone, it keeps the others waiting, or it has ended in good order too early.
        place: "stage 1, micro-batch 3, action 1F3" or "outside a step, after step 12".
        message: one or more lines: type and text.
        traceback: of the user's exception, as text; "" if there is none.
    """

    rank: int
    kind: Literal["exception", "lost", "stalled", "ended"]
    place: str
    message: str
    traceback: str = ""

    @property
    def line(self) -> str:
        """Who, where and what: the last line that every rank prints."""
        return f"rank {self.rank}, {self.place}: {self.message}"

    @classmethod
    def of(cls, rank: int, place: str, error: BaseException) -> Cause:
        """The cause that an exception is."""
        # Not format_exception_only: its notes (PEP 678) would be the last lines.
        kind = type(error)
        name = (
            kind.__qualname__
            if kind.__module__ in ("builtins", "__main__")
            else f"{kind.__module__}.{kind.__qualname__}"
        )
        text = "".join(traceback.format_exception(error))
        return cls(rank, "exception", place, f"{name}: {error}" if str(error) else name, text)

    def __str__(self) -> str:
        return f"{self.traceback.rstrip()}\n{self.line}" if self.traceback else self.line


class Failures:
    """What this rank knows of failures, its own and those of others.

    Args:
        mesh: not yet started.
        where: gives the place of a rank that can't say it any more.

    Attributes:
        cause: the one that holds, if there is one.
        ended: the ranks that have ended in good order, or closed their pipeline.
        gone: the ranks whose process is lost, or ends because of an exception that nobody caught; with its last words.
        raised_at_s: when the cause reached the code of this rank's user (`time.monotonic`); None if it has not.
    """

    def __init__(self, mesh: Mesh, where: Callable[[int], str]) -> None:
        self._mesh, self._where = mesh, where
        self._lock = threading.RLock()
        self._is_known = threading.Event()
        self._wakes: list[Callable[[], None]] = []
        self._death_handlers: list[Callable[[], None]] = []
        self._epoch = 0
        self._ahead: dict[int, Cause] = {}
        self._is_own = False
        self.cause: Cause | None = None
        self.ended: set[int] = set()
        self.gone: dict[int, Cause | None] = {}
        self.raised_at_s: float | None = None
        mesh.on(kinds.CAUSE, self._hear)
        mesh.on(kinds.BYE, self._hear_bye)
        mesh.on_lost(self._lose)

    def on_failure(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when a cause becomes known, and when a peer ends: whoever waits should check again.

        It is called in any thread, at once if a cause is known, and may be called for nothing.
        """
        self._wakes.append(wake)
        if self.cause is not None or self.ended:
            wake()

    def off_failure(self, wake: Callable[[], None]) -> None:
        """Undo `on_failure`."""
        self._wakes.remove(wake)

    def on_death(self, handler: Callable[[], None]) -> None:
        """Call ``handler``, in the mesh's thread, when another process is gone and its cause is known here."""
        self._death_handlers.append(handler)

    def tell(self, cause: Cause) -> Cause:
        """Make a cause known to every rank, unless one is known already; return the one that holds.

        Waits a moment, 0.1 s and more: if a process turns out to be gone, that is the cause, and if another rank
        tells what happens to all of them, its words hold.
        """
        self._is_known.wait(_ECHO_S + self._turn_s)
        with self._lock:
            cause = self.death or cause
            self._adopt(cause, is_own=cause.rank == self._mesh.rank)
            self._note_raised()
            return self.cause or cause

    def check(self) -> None:
        """Go on if no other rank has failed: costs one look at an attribute.

        Raises:
            PeerFailed: there is a cause, and it is not an exception that this rank itself told.
        """
        if self.cause is not None:
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
            self.tell(
                Cause(
                    rank,
                    "ended",
                    "outside a step",
                    f"rank {rank} ended (or closed its pipeline) while rank {self._mesh.rank} waits for {what}: "
                    "the ranks do not run the same number of steps",
                )
            )
            self._raise()

    def forget(self) -> None:
        """Go on after a failure that was undone on all ranks; each has to call this as often as the others.

        Who is gone stays gone: then there is a cause afterwards too.
        """
        with self._lock:
            self._epoch += 1
            self.cause, self._is_own, self.raised_at_s = None, False, None
            self._is_known.clear()
            ahead = self._ahead.pop(self._epoch, None)
            if cause := self.death or ahead:
                self._adopt(cause)

    def report(self, error: BaseException) -> Cause:
        """Tell what this rank's user raised, outside a step; return the cause that holds."""
        if isinstance(error, PeerFailed) and isinstance(error.cause, Cause):
            return error.cause
        return self.tell(Cause.of(self._mesh.rank, self._where(self._mesh.rank), error))

    def say_last_words(self, cause: Cause) -> None:
        """Tell every rank that this process ends, and why."""
        self._send(cause, is_dying=True)

    @property
    def death(self) -> Cause | None:
        """The cause that a process is gone, if one is."""
        if not self.gone:
            return None
        rank, last_words = min(self.gone.items())
        if last_words is not None:
            return last_words
        how = "its process ended without a word" if rank != self._mesh.rank else "its thread of connections has failed"
        return Cause(rank, "lost", self._where(rank), f"{self._mesh.names[rank]} is gone: {how}")

    def _raise(self) -> None:
        cause = self.cause
        if cause is None or self._is_own:
            return
        self._note_raised()
        raise PeerFailed(f"rank {self._mesh.rank} stops, because rank {cause.rank} failed\n\n{cause}", cause=cause)

    @property
    def _turn_s(self) -> float:
        return min(_TURN_S * self._mesh.rank, _LONGEST_TURN_S)

    def _note_raised(self) -> None:
        if self.raised_at_s is None:
            self.raised_at_s = time.monotonic()

    def _adopt(self, cause: Cause, *, is_own: bool = False) -> None:
        """Hold a cause if none is held, hand it on, and wake whoever waits."""
        if self.cause is not None:
            return
        self._is_own = is_own and cause.kind == "exception"
        self.cause = cause
        self._send(cause, is_dying=False)
        self._is_known.set()
        self._wake()

    def _wake(self) -> None:
        for wake in list(self._wakes):
            wake()

    def _send(self, cause: Cause, *, is_dying: bool) -> None:
        said = {"epoch": self._epoch, "is_dying": is_dying, "cause": asdict(cause)}
        self._mesh.broadcast(kinds.CAUSE, json.dumps(said).encode())

    def _hear(self, peer: int, body: memoryview) -> None:
        said: dict[str, Any] = json.loads(bytes(body))
        cause, epoch = Cause(**said["cause"]), int(said["epoch"])
        with self._lock:
            if said["is_dying"]:
                self.gone[peer] = cause
            if said["is_dying"] or epoch == self._epoch:
                self._adopt(cause)
            elif epoch > self._epoch:
                self._ahead.setdefault(epoch, cause)
        if said["is_dying"]:
            self._report_death()

    def _hear_bye(self, peer: int, _: memoryview) -> None:
        self.ended.add(peer)
        self._wake()

    def _lose(self, peer: int) -> None:
        """A connection has closed.

        All ranks see that, each with a place of its own in mind; so the lowest living one speaks, and the others wait
        a little for it.
        """
        if peer in self.gone or peer in self.ended:
            return
        with self._lock:
            self.gone[peer] = None
            living = set(range(self._mesh.num_ranks)) - self.gone.keys() - self.ended
        if self._mesh.rank == min(living, default=self._mesh.rank):
            self._settle_death()
        else:
            later = threading.Timer(_ECHO_S + self._turn_s, self._settle_death)
            later.daemon = True
            later.start()

    def _settle_death(self) -> None:
        with self._lock:
            if cause := self.death:
                self._adopt(cause)
        self._report_death()

    def _report_death(self) -> None:
        for handler in self._death_handlers:
            handler()
