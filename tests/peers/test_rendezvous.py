"""Processes find each other, and nobody else."""

import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeloom.errors import ProcessError
from pipeloom.peers import rendezvous
from pipeloom.peers.rendezvous import Address, Rendezvous, local_host
from tests.peers.ranks import LONG_S, MemoryStore, meshes, raised, until

HOST = "127.0.0.1"


def meet(store, rank, num_ranks=2, timeout_s=LONG_S):
    """A rank's rendezvous; returns whom it is connected to."""
    connections = Rendezvous(store, rank, num_ranks, timeout_s).connect(HOST)
    for connection in connections.values():
        connection.close()
    return sorted(connections)


@pytest.fixture
def waiting():
    """Rank 0 of 2, which waits; its address; and what it comes to."""
    store = MemoryStore()
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(meet, store, 0)
        until(lambda: store.check(["pipeloom/mesh/0"]))
        store.set("pipeloom/mesh/1", Address(HOST, 1, bytes(32), "pid 1 on nowhere").encode())
        yield store, Address.decode(store.get("pipeloom/mesh/0")), met
        if not met.done():
            meet(store, 1)


def call(address, said=b""):
    stranger = socket.create_connection((address.host, address.port))
    stranger.settimeout(LONG_S)
    stranger.sendall(said)
    return stranger


def test_an_address_survives_the_store():
    address = Address("::1", 4321, bytes(range(32)), "pid 4711 on a host")
    assert Address.decode(address.encode().encode()) == address


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_everybody_is_connected_to_everybody(num_ranks):
    with meshes(num_ranks) as made:
        assert [mesh.num_ranks for mesh in made] == [num_ranks] * num_ranks
        assert all(f"rank {rank} (pid " in mesh.names[rank] for mesh in made for rank in range(num_ranks))


def test_ranks_that_do_not_come_are_named():
    store = MemoryStore()
    store.set("pipeloom/mesh/2", "x")
    with pytest.raises(ProcessError, match=r"rank 1 of 4 waited 0\.2 s for other ranks: 0, 3 did not come"):
        meet(store, 1, num_ranks=4, timeout_s=0.2)


def test_a_rank_that_does_not_connect_is_named():
    store = MemoryStore()
    store.set("pipeloom/mesh/1", Address(HOST, 1, bytes(32), "pid 1 on nowhere").encode())
    with pytest.raises(ProcessError, match="other ranks: 1 came, but did not connect"):
        meet(store, 0, timeout_s=0.2)


def test_a_rank_that_left_cannot_be_reached():
    store = MemoryStore()
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    store.set("pipeloom/mesh/0", Address(HOST, port, bytes(32), "pid 4711 on it").encode())
    with pytest.raises(ProcessError, match=rf"cannot connect to rank 0 \(pid 4711 on it\) at 127\.0\.0\.1:{port}: "):
        meet(store, 1)


@pytest.mark.parametrize(("said", "reason"), [(b"y" * 16, "something else answered"), (b"y", "it closed the connect")])
def test_a_listener_without_the_token_is_refused(said, reason):
    store = MemoryStore()
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        store.set("pipeloom/mesh/0", Address(HOST, listener.getsockname()[1], bytes(32), "pid 1 on it").encode())
        error = pool.submit(raised, lambda: meet(store, 1))
        connection, _ = listener.accept()
        with connection:
            connection.recv(20, socket.MSG_WAITALL)
            connection.sendall(said)
        assert reason in str(error.result(LONG_S))


@pytest.mark.parametrize("said", [b"x" * 20, bytes(16) + struct.pack("<I", 1), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_wrong_token_is_dropped(waiting, said):
    store, address, met = waiting
    with call(address, said) as stranger:
        assert gone(stranger)
    assert meet(store, 1) == [0]
    assert met.result(LONG_S) == [1]


def gone(stranger):
    """Whether the other end closed, in order or with a reset."""
    try:
        return stranger.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("rank", [0, 7])
def test_a_rank_that_is_not_expected_is_dropped(waiting, rank):
    _, address, _ = waiting
    with call(address, address.token[:16] + struct.pack("<I", rank)) as stranger:
        assert stranger.recv(100) == address.token[16:]
        assert gone(stranger)


@pytest.mark.parametrize("said", [b"", b"abc"])
def test_a_silent_caller_keeps_nobody_waiting(waiting, said):
    store, address, met = waiting
    with call(address, said):
        assert meet(store, 1) == [0]
        assert met.result(LONG_S) == [1]


def test_a_silent_caller_is_dropped_in_the_end(monkeypatch, waiting):
    monkeypatch.setattr(rendezvous, "_HELLO_S", 0.05)
    _, address, met = waiting
    with call(address) as stranger:
        assert gone(stranger)
    assert not met.done()


def test_nothing_stays_open_after_a_failure():
    store, found = MemoryStore(), []
    store.set("pipeloom/mesh/1", Address(HOST, 1, bytes(32), "x").encode())
    meeting = Rendezvous(store, 0, 2, 0.1)
    found.append(raised(lambda: meeting.connect(HOST)))
    port = meeting.addresses[0].port
    with pytest.raises(ConnectionRefusedError, match="refused"):
        socket.create_connection((HOST, port))
    assert isinstance(found[0], ProcessError)


@pytest.mark.parametrize("master", [None, "localhost", "127.0.0.1"])
def test_a_job_on_one_host_stays_there(monkeypatch, master):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if master:
        monkeypatch.setenv("MASTER_ADDR", master)
    assert local_host() in ("127.0.0.1", "::1")


def test_a_master_that_cannot_be_resolved_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    with pytest.raises(ProcessError, match=r"MASTER_ADDR=nowhere\.invalid cannot be reached from this host: no name"):
        local_host()


def unresolved(*_, **__):
    raise socket.gaierror("no name")


def test_waiting_can_be_interrupted(monkeypatch):
    pauses = []

    def interrupt(pause_s):
        pauses.append(pause_s)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        meet(MemoryStore(), 0)
    assert pauses == [0.001, 0.002, 0.004]
