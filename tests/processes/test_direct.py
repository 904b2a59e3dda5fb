"""Connections that a rank reads itself: whatever happens to one ends a wait."""

import socket

import pytest

from pipeloom.processes.direct import Direct


@pytest.fixture
def ends():
    """One rank's connections to two others, and the others' ends, with what the first has received."""
    received, pairs = [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(2):
            pairs.append((socket.create_connection(listener.getsockname()), listener.accept()[0]))
    direct = Direct({peer: pair[0] for peer, pair in enumerate(pairs, 1)}, lambda *each: received.append(each))
    others = [Direct({0: pair[1]}, lambda *_: None) for pair in pairs]
    yield direct, others, received
    for each in (direct, *others):
        each.close()


def test_a_wait_hands_over_what_all_ranks_sent(ends):
    direct, others, received = ends
    others[0].send(0, b"first")
    others[1].send(0, b"second")
    while len(received) < 2:
        assert direct.wait(60.0)
    assert {(peer, bytes(body)) for peer, body in received} == {(1, b"first"), (2, b"second")}
    assert not direct.wait(0.0)


def test_a_poll_asks_one_rank_alone(ends):
    direct, others, received = ends
    others[1].send(0, b"second")
    while not direct.poll(2):
        assert not direct.poll(1)
    assert [(peer, bytes(body)) for peer, body in received] == [(2, b"second")]


def test_a_wake_ends_a_wait_once(ends):
    direct, _, received = ends
    direct.wake()
    direct.wake()
    assert direct.wait(60.0)
    assert not direct.wait(0.0)
    assert not received


def test_a_closed_connection_is_no_reason_to_stay_awake(ends):
    direct, others, received = ends
    others[0].close()
    assert direct.wait(60.0)
    assert not direct.wait(0.0)
    assert not direct.poll(1)
    direct.send(1, b"to nobody")
    others[1].send(0, b"still heard")
    assert direct.wait(60.0)
    assert bytes(received[0][1]) == b"still heard"


def test_a_wait_writes_what_did_not_fit(ends):
    direct, others, _ = ends
    num_sent = 0
    while not direct.unsent:
        direct.send(1, bytes(60_000))
        num_sent += 1
    others[0]._received = lambda *_: arrived.append(1)
    arrived = []
    while len(arrived) < num_sent:
        direct.wait(0.01)
        others[0].wait(0.01)
    assert direct.unsent == set()
