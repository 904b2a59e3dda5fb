"""Connections that the rank itself reads, while it waits.

Handing a small message from the thread of the mesh to the rank wakes two threads where one would do, and both want the
interpreter's lock: that cost more than all the rest of a message [measured with stages that do nothing]. While a rank
computes, what comes lies in its system's buffers; so nothing large goes this way.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Mapping

from pipeloom.peers import Link

_WAKE = -1


class Direct:
    """One connection to each other rank, for small messages.

    Args:
        connections: by rank.
        received: gets (peer, body) of each message, in the thread that calls `poll` or `wait`.

    Attributes:
        unsent: the ranks whose connection has not taken all that was sent.
    """

    def __init__(self, connections: Mapping[int, socket.socket], received: Callable[[int, memoryview], None]) -> None:
        self._links = {peer: Link(connection) for peer, connection in connections.items()}
        self._received = received
        self.unsent: set[int] = set()
        self._closed: set[int] = set()
        self._selector = selectors.DefaultSelector()
        for peer, link in self._links.items():
            self._selector.register(link.connection, selectors.EVENT_READ, peer)
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._selector.register(self._wakened, selectors.EVENT_READ, _WAKE)

    def send(self, peer: int, body: bytes) -> None:
        """Send a message; what the connection does not take at once goes out while this rank waits."""
        link = self._links[peer]
        try:
            link.send_small(0, body)
        finally:  # Ctrl-C may have come between a frame's halves
            if link.has_rest:
                self._await_room(peer, link)

    def poll(self, peer: int) -> bool:
        """Hand over what has come from one rank, and say whether anything has."""
        link = self._links[peer]
        frames = link.receive()
        if frames:
            for _, body in frames:
                self._received(peer, body)
            return True
        if frames is None:  # the mesh says why
            self._close(peer, link)
        return False

    def wait(self, limit_s: float) -> bool:
        """Hand over what has come; if nothing has, wait for it or for `wake`, and say whether something happened."""
        events = self._selector.select(limit_s)
        for key, mask in events:
            if key.data == _WAKE:
                with contextlib.suppress(BlockingIOError):
                    self._wakened.recv(4096)
                continue
            if mask & selectors.EVENT_WRITE:
                self._flush(key.data)
            if mask & selectors.EVENT_READ:
                self.poll(key.data)
        return bool(events)

    @property
    def has_unread(self) -> bool:
        """Whether something has come that this rank has not read; may be asked in any thread."""
        try:
            events = self._selector.select(0.0)
        except (OSError, ValueError):  # closed meanwhile
            return False
        return any(key.data != _WAKE and mask & selectors.EVENT_READ for key, mask in events)

    def wake(self) -> None:
        """End a `wait`, now or later; from any thread."""
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: nobody waits
            self._waker.send(b"!")

    def close(self) -> None:
        """Close the connections."""
        self._selector.close()
        for link in self._links.values():
            link.close()
        self._waker.close()
        self._wakened.close()

    def _await_room(self, peer: int, link: Link) -> None:
        if peer not in self.unsent and peer not in self._closed:
            self.unsent.add(peer)
            self._selector.modify(link.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def _flush(self, peer: int) -> None:
        link = self._links[peer]
        link.flush()
        if not link.has_rest:
            self.unsent.discard(peer)
            self._selector.modify(link.connection, selectors.EVENT_READ, peer)

    def _close(self, peer: int, link: Link) -> None:
        if peer not in self._closed:
            self._closed.add(peer)
            self.unsent.discard(peer)
            self._selector.unregister(link.connection)
