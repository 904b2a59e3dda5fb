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
        received: gets (peer, body) of each message, in the thread that calls `wait`.
    """

    def __init__(self, connections: Mapping[int, socket.socket], received: Callable[[int, memoryview], None]) -> None:
        self._links = {peer: Link(connection) for peer, connection in connections.items()}
        self._received = received
        self._selector = selectors.DefaultSelector()
        for peer, link in self._links.items():
            self._selector.register(link.connection, selectors.EVENT_READ, peer)
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._selector.register(self._wakened, selectors.EVENT_READ, _WAKE)

    def send(self, peer: int, *parts: bytes | memoryview) -> None:
        """Send a message; what the connection does not take at once goes out with the next call."""
        self._links[peer].send(0, parts)

    def wait(self, limit_s: float) -> bool:
        """Hand over what has come; if nothing has, wait for it or for `wake`, and say whether something happened."""
        self._flush()
        events = self._selector.select(limit_s)
        for key, _ in events:
            if key.data == _WAKE:
                with contextlib.suppress(BlockingIOError):
                    self._wakened.recv(4096)
            else:
                self._receive(key.data)
        return bool(events)

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

    def _flush(self) -> None:
        for link in self._links.values():
            if link.has_rest:
                link.flush()

    def _receive(self, peer: int) -> None:
        link = self._links[peer]
        frames = link.receive()
        if frames is None:  # the mesh says why
            self._selector.unregister(link.connection)
        for _, body in frames or ():
            self._received(peer, body)
