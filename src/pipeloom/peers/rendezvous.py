"""How the processes of a pipeline find each other: through a store that they share.

Each listens on a port of its own and puts its address into the store; of two, the higher rank connects to the lower
one. A port may be found by anybody (a port scanner, a process of the last attempt), so a connection counts only
once the caller has shown one half of the listener's token and the listener has answered with the other half.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pipeloom.errors import ProcessError

_KEY = "pipeloom/mesh/{}"
_LATE = "pipeloom/late"
"""Where the first whose patience is over says so for all: if it keeps the store, that goes with it."""
_LATE_HINT = "start the same program once for every rank; their own output says whether they failed before"
_READ_S = 0.3
"""Until all who look have read it."""
_HALF_BYTES = 16
_HELLO = struct.Struct(f"<{_HALF_BYTES}sI")
_HELLO_S = 5.0
_POLL_S = (0.001, 0.1)


class Store(Protocol):
    """What is used of a ``torch.distributed.Store``; give each mesh a prefix of its own (``PrefixStore``)."""

    def set(self, key: str, value: str) -> None:
        """Put a value."""

    def get(self, key: str) -> bytes:
        """Return a value; wait until it is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


class Address(NamedTuple):
    """Where a rank listens, and how reports name its process."""

    host: str
    port: int
    token: bytes
    process: str

    def encode(self) -> str:
        """Text for the store."""
        return f"{self.host} {self.port} {self.token.hex()} {self.process}"

    @classmethod
    def decode(cls, value: bytes) -> Address:
        """Read `encode`'s text."""
        host, port, token, process = value.decode().split(" ", 3)
        return cls(host, int(port), bytes.fromhex(token), process)


@dataclass
class Rendezvous:
    """One rank's part in it.

    Args:
        store: shared by all ranks.
        rank: this process.
        num_ranks: how many there are.
        timeout_s: until all are connected.
        look: called again and again while others are waited for, to see whether there is any hope; it may raise.
    """

    store: Store
    rank: int
    num_ranks: int
    timeout_s: float
    look: Callable[[], None] | None = None
    addresses: dict[int, Address] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.timeout_s

    def arrive(self) -> None:
        """Say that this rank is here, and wait for the others to say it.

        Raises:
            ProcessError: a rank did not come in time.
        """
        self.store.set(_KEY.format(self.rank), "here")
        self._wait_for_all()

    def connect(self, host: str) -> dict[int, socket.socket]:
        """Return a connection to every other rank.

        Raises:
            ProcessError: a rank did not come in time, or cannot be reached.
        """
        connections: dict[int, socket.socket] = {}
        try:
            with _listener(host, self.num_ranks) as listener:
                self._exchange(Address(host, listener.getsockname()[1], secrets.token_bytes(2 * _HALF_BYTES), _me()))
                for peer in range(self.rank):
                    connections[peer] = self._call(peer)
                self._accept(listener, connections)
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        return connections

    def _exchange(self, own: Address) -> None:
        self.store.set(_KEY.format(self.rank), own.encode())
        self._wait_for_all()
        for rank in range(self.num_ranks):
            self.addresses[rank] = Address.decode(self.store.get(_KEY.format(rank)))

    def _wait_for_all(self) -> None:
        # Asked again and again: a `get` that waits could be ended neither by Ctrl-C nor by our time limit.
        pause_s, longest_s = _POLL_S
        while missing := self._missing():
            self._hope(missing, "did not come")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _missing(self) -> list[int]:
        keys = [_KEY.format(rank) for rank in range(self.num_ranks)]
        if self.store.check(keys):
            return []
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def _hope(self, missing: Iterable[int], what: str) -> None:
        if self.look is not None:
            self.look()
        if self.store.check([_LATE]):
            raise ProcessError(self.store.get(_LATE).decode(), _LATE_HINT)
        if time.monotonic() > self._deadline:
            names = ", ".join(map(str, missing))
            late = ProcessError(
                f"rank {self.rank} of {self.num_ranks} waited {self.timeout_s:g} s for other ranks: {names} {what}",
                _LATE_HINT,
            )
            self.store.set(_LATE, late.message)
            time.sleep(_READ_S)
            raise late

    def _call(self, peer: int) -> socket.socket:
        address = self.addresses[peer]
        try:
            connection = socket.create_connection((address.host, address.port), self._left_s())
            try:
                self._introduce(connection, address.token)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            raise ProcessError(
                f"rank {self.rank} cannot connect to rank {peer} ({address.process}) at "
                f"{address.host}:{address.port}: {error}",
                "the hosts must reach each other on any port; MASTER_ADDR decides which network is used",
            ) from error
        return connection

    def _introduce(self, connection: socket.socket, token: bytes) -> None:
        connection.sendall(_HELLO.pack(token[:_HALF_BYTES], self.rank))
        answer = b""
        while len(answer) < _HALF_BYTES:
            connection.settimeout(self._left_s())
            piece = connection.recv(_HALF_BYTES - len(answer))
            if not piece:
                raise ConnectionError("it closed the connection")
            answer += piece
        if not hmac.compare_digest(answer, token[_HALF_BYTES:]):
            raise ConnectionError("something else answered")

    def _left_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _accept(self, listener: socket.socket, connections: dict[int, socket.socket]) -> None:
        expected = set(range(self.rank + 1, self.num_ranks))
        with _Door(listener, self.addresses[self.rank].token) as door:
            while missing := expected - connections.keys():
                self._hope(sorted(missing), "came, but did not connect")
                for rank, connection in door.entering(min(self._left_s(), 0.5)):
                    if rank in missing and rank not in connections:
                        connections[rank] = connection
                    else:
                        connection.close()


class _Door:
    """Lets in who knows the token; a caller that says nothing keeps nobody else waiting."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener = listener
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._guests: dict[socket.socket, tuple[bytearray, float]] = {}

    def __enter__(self) -> _Door:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        for guest in self._guests:
            guest.close()

    def entering(self, wait_s: float) -> Iterable[tuple[int, socket.socket]]:
        """Wait for a caller at most ``wait_s``; yield rank and connection of those who show the token."""
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._open()
            elif isinstance(key.fileobj, socket.socket) and (rank := self._heard(key.fileobj)) is not None:
                yield rank, key.fileobj
        for guest in [guest for guest, (_, until) in self._guests.items() if time.monotonic() > until]:
            self._forget(guest).close()

    def _open(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except OSError:  # gone again
            return
        guest.setblocking(False)
        self._guests[guest] = bytearray(), time.monotonic() + _HELLO_S
        self._selector.register(guest, selectors.EVENT_READ)

    def _forget(self, guest: socket.socket) -> socket.socket:
        self._selector.unregister(guest)
        del self._guests[guest]
        return guest

    def _heard(self, guest: socket.socket) -> int | None:
        """The rank that a guest turned out to be, if it has said so by now."""
        said, _ = self._guests[guest]
        try:
            piece = guest.recv(_HELLO.size - len(said))
            said += piece
            if piece and len(said) < _HELLO.size:
                return None
            if piece:
                half, rank = _HELLO.unpack(said)
                if hmac.compare_digest(half, self._token[:_HALF_BYTES]):
                    guest.sendall(self._token[_HALF_BYTES:])
                    self._forget(guest)
                    return int(rank)
        except OSError:
            pass
        self._forget(guest).close()
        return None


def local_host() -> str:
    """Return the address of this host that others of the job can reach: the one from which ``MASTER_ADDR`` is reached.

    Raises:
        ProcessError: ``MASTER_ADDR`` cannot be resolved or reached.
    """
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # connecting UDP sends nothing: it only chooses a route
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ProcessError(f"MASTER_ADDR={master} cannot be reached from this host: {error}") from error


def _listener(host: str, num_ranks: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=num_ranks + 8)


def _me() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
