"""Connections between all processes of a pipeline: the control plane.

torch.distributed's gloo can be neither polled nor told to stop waiting, and a rank that waits for a living one does not
hear that another has died. A TCP connection of our own to each rank can be asked all of that, closes the moment
its process ends, however it ends, stays open while a process is merely stopped, and carries a small message in a tenth
of the time (docs/decisions/0012-sockets-of-our-own.md).

One daemon thread reads all of them. Forked children (workers of a data loader) get none of it: the connections are
closed there, or a child would keep those of a dead parent open.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping

from pipeloom.peers.link import Link, Part
from pipeloom.peers.rendezvous import Rendezvous, Store, local_host

Handler = Callable[[int, memoryview], None]
"""Gets (peer, body) in the mesh's thread; has to be short and must not raise. The body is its to keep."""

_FLUSH_S = 2.0


class Mesh:
    """Connections between all processes of a pipeline, one per pair, read by one daemon thread.

    Attributes:
        rank: this process.
        num_ranks: how many there are.
        names: how reports name each rank: "rank 2 (pid 4711 on HOST)".
    """

    def __init__(self, rank: int, names: list[str], connections: Mapping[int, socket.socket]) -> None:
        self.rank, self.num_ranks, self.names = rank, len(names), names
        self._links = {peer: Link(connection) for peer, connection in connections.items()}
        self._handlers: dict[int, Handler] = {}
        self._lost_handlers: list[Callable[[int], None]] = []
        self._unsent: deque[int] = deque()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name=f"pipeloom-mesh-{rank}", daemon=True)
        _LIVING.add(self)

    @classmethod
    def connect(
        cls,
        store: Store,
        rank: int,
        num_ranks: int,
        *,
        host: str | None = None,
        timeout_s: float = 60.0,
        look: Callable[[], None] | None = None,
    ) -> Mesh:
        """Find the other ranks and connect to them; collective.

        Args:
            store: shared by all ranks, and used by no other mesh (``PrefixStore``).
            rank: this process.
            num_ranks: how many there are.
            host: the address of this host under which the others reach it; by default the one from which it reaches
                ``MASTER_ADDR``.
            timeout_s: how long to wait for the others.
            look: called again and again meanwhile, to see whether there is any hope; it may raise.

        Raises:
            ProcessError: ranks are missing after ``timeout_s``, which it names, or cannot be reached.
        """
        rendezvous = Rendezvous(store, rank, num_ranks, timeout_s, look)
        connections = rendezvous.connect(host or local_host())
        names = [f"rank {peer} ({rendezvous.addresses[peer].process})" for peer in range(num_ranks)]
        return cls(rank, names, connections)

    def on(self, kind: int, handler: Handler) -> None:
        """Let ``handler`` have the frames of a kind instead of the one that had them; before `start`.

        Kinds go from 0 to 255; those from 240 are this room's own (`pipeloom.peers.kinds`).
        """
        self._handlers[kind] = handler

    def on_lost(self, handler: Callable[[int], None]) -> None:
        """Call ``handler(peer)``, in the mesh's thread, when a peer's connection closes; several may be given.

        With this rank itself: the thread ends, because a handler raised.
        """
        self._lost_handlers.append(handler)

    def start(self) -> None:
        """Begin to read; what arrived before has waited."""
        for peer, link in self._links.items():
            self._selector.register(link.connection, selectors.EVENT_READ, peer)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._thread.start()

    def send(self, peer: int, kind: int, *parts: Part) -> None:
        """Send the parts as one frame: in order per peer, from any thread, without waiting.

        The parts may be changed as soon as this returns. To this rank itself: calls the handler, in this thread. To a
        peer that is lost, or after `close`: nothing happens, `on_lost` has said so or will.
        """
        if peer == self.rank:
            self._handlers[kind](peer, memoryview(bytearray(b"".join(parts))))
            return
        link = self._links[peer]
        try:
            link.send(kind, parts)
        finally:  # Ctrl-C may have come between a frame's halves: the thread sends the second one
            if link.has_rest:
                self._unsent.append(peer)
                self._wake()

    @property
    def is_busy(self) -> bool:
        """Whether a frame is under way to or from a peer."""
        return any(link.is_busy for link in self._links.values())

    def broadcast(self, kind: int, *parts: Part) -> None:
        """`send` to every other rank."""
        for peer in self._links:
            self.send(peer, kind, *parts)

    def close(self) -> None:
        """Send what waits, for 2 s at most, and close all connections. A second call does nothing."""
        self._is_closing = True
        self._wake()
        if self._thread is threading.current_thread():
            return
        if self._thread.is_alive():
            self._thread.join(_FLUSH_S + 1)
        else:
            self._release()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is about to wake; closed: there is nothing to wake
            self._waker.send(b"!")

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                self._serve_once(None)
            until = time.monotonic() + _FLUSH_S
            while any(link.has_rest for link in self._links.values()) and (left_s := until - time.monotonic()) > 0:
                self._serve_once(left_s)
        except BaseException:  # a handler raised: the others see this rank as lost, and here nobody waits for ever
            self._tell_lost(self.rank)
            raise
        finally:
            self._release()

    def _serve_once(self, wait_s: float | None) -> None:
        for key, events in self._selector.select(wait_s):
            if key.data is None:
                self._arm()
                continue
            link = self._links[key.data]
            if events & selectors.EVENT_WRITE:
                link.flush()
                if not link.has_rest:
                    self._selector.modify(link.connection, selectors.EVENT_READ, key.data)
            if events & selectors.EVENT_READ:
                self._receive(key.data, link)

    def _arm(self) -> None:
        """Ask to be told when the peers that have something unsent can take it."""
        with contextlib.suppress(BlockingIOError):
            self._wakened.recv(4096)
        while self._unsent:
            peer = self._unsent.popleft()
            if not self._links[peer].is_broken:
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(self._links[peer].connection, both, peer)

    def _receive(self, peer: int, link: Link) -> None:
        frames = link.receive()
        for kind, body in frames or ():
            self._handlers[kind](peer, body)
        if frames is None:
            self._selector.unregister(link.connection)
            link.close()
            self._tell_lost(peer)

    def _tell_lost(self, peer: int) -> None:
        for handler in self._lost_handlers:
            handler(peer)

    def _release(self) -> None:
        self._selector.close()
        for link in self._links.values():
            link.close()
        self._waker.close()
        self._wakened.close()
        _LIVING.discard(self)

    def _abandon(self) -> None:
        self._is_closing = True
        self._selector.close()
        for link in self._links.values():
            link.abandon()
        self._waker.close()
        self._wakened.close()


_LIVING: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _abandon_all() -> None:
    for mesh in list(_LIVING):
        mesh._abandon()
    _LIVING.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
