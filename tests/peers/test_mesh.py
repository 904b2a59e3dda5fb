"""Frames between ranks: in order, without waiting, and the end of a peer is seen."""

import os
import signal
import socket
import struct
import threading
from queue import SimpleQueue

import pytest
import torch.distributed as dist

from pipeloom.peers import Mesh
from tests.peers.ranks import LONG_S, meshes, processes, ranks, run, together

BIG = 20_000_000


def numbered(count):
    return [struct.pack("<I", number) for number in range(count)]


def test_a_thousand_small_frames_come_in_order():
    with ranks(2) as (one, other):
        for text in numbered(1000):
            one.mesh.send(1, 1, text)
        assert other.take(1000) == [(0, text) for text in numbered(1000)]


def test_threads_do_not_mix_their_frames():
    with ranks(3) as (one, two, three):

        def send_all(sender, letter):
            for text in numbered(300):
                sender.mesh.send(2, 1, letter, text, bytes(len(letter) * 5000))

        together(*[lambda s=sender, x=x: send_all(s, x) for sender in (one, two) for x in (b"a", b"b")])
        found = three.take(1200)
    for peer in (0, 1):
        for letter in (b"a", b"b"):
            texts = [body[1:5] for sender, body in found if sender == peer and body[:1] == letter]
            assert texts == numbered(300)


def test_big_frames_cross_without_a_deadlock():
    with ranks(2) as (one, other):
        for _ in range(3):
            one.mesh.send(1, 1, bytes(BIG), b"1")
            other.mesh.send(0, 1, bytes(BIG), b"2")
        assert one.take(3) == [(1, bytes(BIG) + b"2")] * 3
        assert other.take(3) == [(0, bytes(BIG) + b"1")] * 3


def test_a_send_does_not_wait_for_a_peer_that_does_not_read():
    with meshes(2) as (one, other):
        inbox = SimpleQueue()
        other.on(1, lambda peer, body: inbox.put(bytes(body[-1:])))
        for text in (b"1", b"2", b"3"):
            one.send(1, 1, bytes(BIG), text)
        one.start()
        other.start()
        assert [inbox.get(timeout=LONG_S) for _ in range(3)] == [b"1", b"2", b"3"]


def test_a_frame_to_itself_is_handled_at_once():
    with ranks(2) as (one, _):
        one.mesh.send(0, 1, b"a", memoryview(b"b"))
        assert one.inbox.get_nowait() == (0, b"ab")


def test_a_handler_may_keep_and_write_the_body():
    with meshes(2) as (one, other):
        bodies = SimpleQueue()
        other.on(1, lambda peer, body: bodies.put(body))
        one.start(), other.start()
        one.send(1, 1, b"a"), one.send(1, 1, b"b")
        first, second = (bodies.get(timeout=LONG_S) for _ in range(2))
        first[:] = b"z"
        assert (bytes(first), bytes(second)) == (b"z", b"b")


def test_a_later_handler_takes_the_place_of_the_first():
    with meshes(2) as (one, other):
        first, second = SimpleQueue(), SimpleQueue()
        other.on(1, lambda peer, body: first.put(peer))
        other.on(1, lambda peer, body: second.put(peer))
        one.start(), other.start()
        one.send(1, 1)
        assert second.get(timeout=LONG_S) == 0
        assert first.empty()


def test_a_broadcast_reaches_all_others():
    with ranks(3) as (one, two, three):
        two.mesh.broadcast(1, b"x")
        assert one.take(1) == three.take(1) == [(1, b"x")]
        assert two.inbox.empty()


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_lost_peer_is_told_once(has_begun):
    with meshes(3) as (one, two, three):
        lost = SimpleQueue()
        one.on(1, lambda peer, body: None)
        one.on_lost(lost.put)
        one.start()
        if has_begun:  # a frame of which half has come
            one._links[2].connection.setblocking(False)
            three._links[0].connection.sendall(struct.pack("<QB", BIG, 1) + bytes(100_000))
        three.close()
        assert lost.get(timeout=LONG_S) == 2
        one.send(2, 1, b"into the void")
        one.close(), two.close()
        assert lost.empty()


def test_what_was_sent_before_the_end_comes_before_the_end():
    with meshes(2) as (one, other):
        events = SimpleQueue()
        other.on(1, lambda peer, body: events.put(len(body)))
        other.on_lost(lambda peer: events.put("lost"))
        one.on(1, lambda peer, body: None)
        one.start()
        for size in (3, BIG, 5):
            one.send(1, 1, bytes(size))
        for _ in range(100):  # unread by a peer that closes: must not take back what it sent
            other.send(0, 1, bytes(1000))
        closing = threading.Thread(target=one.close)
        closing.start()
        other.start()
        assert [events.get(timeout=LONG_S) for _ in range(4)] == [3, BIG, 5, "lost"]
        closing.join()


@pytest.mark.parametrize("is_started", [False, True])
def test_close_may_be_called_again(is_started):
    with meshes(2) as (one, _):
        if is_started:
            one.start()
        one.close()
        one.close()
        one.send(1, 1, b"late")
        assert not one._thread.is_alive()


def test_a_handler_may_close_the_mesh():
    with meshes(2) as (one, other):
        other.on(1, lambda peer, body: other.close())
        one.start(), other.start()
        one.send(1, 1)
        other._thread.join(LONG_S)
        assert not other._thread.is_alive()


def test_a_handler_that_raises_loses_this_rank(monkeypatch):
    reported = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", reported.put)
    with meshes(2) as (one, other):
        here, there = SimpleQueue(), SimpleQueue()
        one.on_lost(there.put)
        other.on_lost(here.put)
        other.on(1, lambda peer, body: 1 / 0)
        one.start(), other.start()
        one.send(1, 1)
        assert (here.get(timeout=LONG_S), there.get(timeout=LONG_S)) == (1, 1)
        assert reported.get(timeout=LONG_S).exc_type is ZeroDivisionError


def test_it_meets_in_a_store_of_torch():
    port = free_port()
    first = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    stores = [first, dist.TCPStore("127.0.0.1", port, wait_for_workers=False)]
    stores = [dist.PrefixStore("attempt 1", store) for store in stores]
    made = together(*[lambda rank=rank: Mesh.connect(stores[rank], rank, 2) for rank in range(2)])
    assert [mesh.rank for mesh in made] == [0, 1]
    for mesh in made:
        mesh.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


FORKING = """
if me.rank == 1:
    child = os.fork()
    if child == 0:
        me.mesh.send(0, 1, b"from a child")
        time.sleep(600)
    me.mesh.send(0, 1, str(child).encode())
me.ready()
if me.rank == 0:
    ((_, child),) = me.take(1)
    until(lambda: 1 in me.failures.gone)
    os.kill(int(child), 9)  # which lives
    sys.stdout.write(me.failures.cause.kind)
    sys.stdout.flush()
    os._exit(0)
time.sleep(600)
"""


def test_a_forked_child_does_not_keep_a_dead_parent_alive(tmp_path):
    with processes(tmp_path, 2, FORKING) as running:
        running.wait_until_ready()
        running.signal(1, signal.SIGKILL)
        first, second = running.ended()
    assert (first.code, first.out) == (0, "ready\nlost"), first.err
    assert second.code == -signal.SIGKILL


def test_a_forked_child_that_closes_the_mesh_leaves_it_open(tmp_path):
    program = "me.gather()\nchild = os.fork()\nme.mesh.close() if not child else None\nif not child: os._exit(0)\n"
    ends = run(tmp_path, 2, f"{program}os.waitpid(child, 0)\nme.gather()")
    assert [(end.code, end.err) for end in ends] == [(0, "")] * 2


def test_names_tell_process_and_host():
    with meshes(2) as (one, _):
        assert one.names[1] == f"rank 1 (pid {os.getpid()} on {socket.gethostname()})"
