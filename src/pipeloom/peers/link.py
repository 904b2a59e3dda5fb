"""One connection: what is sent becomes frames, what arrives is cut into frames.

Waiting for a socket to take all of a big frame is the deadlock of two ranks that send to each other at once. So
what a socket does not take stays here until it does; and nothing that Ctrl-C could interrupt may tear a frame.

A frame is 8 bytes of length (little-endian), 1 byte of kind, and the body.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence

Frame = tuple[int, memoryview]
Part = bytes | memoryview

_HEADER = struct.Struct("<QB")
_BUFFER_BYTES = 1 << 16
_MAX_DRAINS = 1_000
_MAX_PARTS = 64
"""Handed to the system at once; Linux takes 1024."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds, seconds, number: a host that lost power or its network is noticed in 30 s. A stopped process is not:
its system goes on answering."""


class Link:
    """A connection to one peer; any thread may send, one thread receives.

    Attributes:
        is_broken: whether nothing can be sent any more.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        _configure(connection)
        # Re-entrant: a signal handler may send while it interrupts a send.
        self._lock = threading.RLock()
        self.is_broken = False
        self._frame = _NOTHING
        self._backlog: deque[Sequence[Part]] = deque()
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._num_over = 0
        self._kind, self._body, self._num_filled = 0, _EMPTY, 0

    @property
    def is_busy(self) -> bool:
        """Whether a frame is under way, in or out."""
        return self.has_rest or self._num_filled < len(self._body)

    @property
    def has_rest(self) -> bool:
        """Whether something waits for the socket to take it."""
        return bool(self._frame.parts or self._backlog)

    def send(self, kind: int, parts: Sequence[Part]) -> None:
        """Write a frame, as much of it as the socket takes; the rest waits for `flush`.

        A rest is a copy, so the caller may change its memory. After the connection broke nothing is sent.
        """
        header = _HEADER.pack(sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts), kind)
        with self._lock:
            if self.has_rest:
                self._backlog.append([header, *_kept(parts)])
            elif not self.is_broken:
                self._frame = _Outgoing((header, *parts))
                self._write()

    def send_small(self, kind: int, body: bytes) -> None:
        """The same for a body in one piece, which the socket takes at once as a rule: a third of the work of `send`."""
        frame = _HEADER.pack(len(body), kind) + body
        with self._lock:
            if self._frame is not _NOTHING or self._backlog or self.is_broken:
                self.send(kind, (body,))
                return
            self._frame = given = _Outgoing((frame,))
            try:
                given.taken.extend(map(self.connection.send, given.parts))
            except BlockingIOError:
                return
            except OSError:
                self._break()
                return
            self._frame = _NOTHING if given.taken[0] == len(frame) else given.rest()

    def flush(self) -> None:
        """Write what waits, as much of it as the socket takes."""
        with self._lock:
            self._frame = self._frame.rest()
            while self._next() and self._write():
                pass

    def receive(self) -> list[Frame] | None:
        """Return the frames that are complete by now; None when the connection is closed."""
        is_between = not self._num_over and self._body is _EMPTY
        try:
            if is_between:
                num_bytes = self.connection.recv_into(self._buffer)
            else:
                rooms = [self._body[self._num_filled :], self._buffer[self._num_over :]]
                num_bytes = self.connection.recvmsg_into(rooms)[0]
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not num_bytes:
            return None
        return self._cut_buffer(num_bytes) if is_between else self._cut(num_bytes)

    def close(self) -> None:
        """Close, with what arrived meanwhile read: closing over unread bytes would reset the connection, and a reset
        may overtake what was sent last.
        """
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            for _ in range(_MAX_DRAINS):
                self.connection.recv(_BUFFER_BYTES)
        self._break()
        self.connection.close()

    def abandon(self) -> None:
        """Let go of the connection without a word to the peer: in a forked child it is the parent's."""
        self._lock = threading.RLock()  # the one of the parent may have been held when it forked
        self._break()
        self.connection.close()

    def _break(self) -> None:
        with self._lock:
            self.is_broken = True
            self._backlog.clear()
            self._frame = _NOTHING

    def _next(self) -> bool:
        if not self._frame.parts and self._backlog:
            self._frame = _Outgoing(tuple(self._backlog.popleft()))
        return bool(self._frame.parts)

    def _write(self) -> bool:
        """Write from the current frame; whether the socket took all that it was given."""
        given = self._frame
        try:
            given.write(self.connection)
        except BlockingIOError:
            return False
        except OSError:
            self._break()
            return False
        self._frame = given.rest()
        return not self._frame.parts or len(given.parts) > _MAX_PARTS

    def _cut(self, num_bytes: int) -> list[Frame]:
        frames = []
        num_missing = len(self._body) - self._num_filled
        if num_missing:
            self._num_filled += min(num_bytes, num_missing)
            if num_bytes < num_missing:
                return []
            frames.append((self._kind, self._body))
            self._body, self._num_filled = _EMPTY, 0
        frames += self._cut_buffer(self._num_over + num_bytes - num_missing)
        return frames

    def _cut_buffer(self, end: int) -> list[Frame]:
        frames, start = [], 0
        while end - start >= _HEADER.size:
            size, kind = _HEADER.unpack_from(self._buffer, start)
            start += _HEADER.size
            if end - start < size:
                self._begin(kind, size, self._buffer[start:end])
                start = end
            else:
                frames.append((kind, memoryview(bytearray(self._buffer[start : start + size]))))
                start += size
        self._num_over = end - start
        if self._num_over:
            self._buffer[: self._num_over] = bytes(self._buffer[start:end])
        return frames

    def _begin(self, kind: int, size: int, beginning: memoryview) -> None:
        """Receive the rest of a body where it stays."""
        self._kind, self._body, self._num_filled = kind, memoryview(bytearray(size)), len(beginning)
        self._body[: len(beginning)] = beginning


class _Outgoing:
    """A frame under way.

    Between a system call and noting how many bytes it took, Ctrl-C may strike: the frame would be torn, and the
    stream with it. So the number goes from the call into ``taken`` without leaving C, and `rest` can be asked again.
    """

    __slots__ = ("parts", "taken")

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts
        self.taken: list[int] = []

    def write(self, connection: socket.socket) -> None:
        """Write once. Raises what the socket does."""
        self.taken.extend(map(connection.sendmsg, (self.parts[:_MAX_PARTS],)))

    def rest(self) -> _Outgoing:
        """What has not been written yet."""
        if not self.taken:
            return self
        (num_taken,) = self.taken
        for i, part in enumerate(self.parts):
            num_bytes = memoryview(part).nbytes
            if num_taken < num_bytes:
                begun = memoryview(part).cast("B")[num_taken:]
                return _Outgoing((*_kept([begun]), *_kept(self.parts[i + 1 :])))
            num_taken -= num_bytes
        return _NOTHING


_NOTHING = _Outgoing(())
_EMPTY = memoryview(bytearray())


def _kept(parts: Iterable[Part]) -> list[Part]:
    """Copies of what its owner may change."""
    return [part if isinstance(part, bytes) or isinstance(part.obj, bytes) else part.tobytes() for part in parts]


def _configure(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
