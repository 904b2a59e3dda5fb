"""Frames: whole, in order, and torn by nothing."""

import array
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.peers.link import Link
from tests.peers.ranks import together

sizes = st.integers(0, 300) | st.integers(60_000, 70_000) | st.just(200_000)
frames = st.lists(st.tuples(st.integers(0, 255), sizes), min_size=1, max_size=8)
BIG = 12_000_000
"""More than the system's buffers take."""


@contextmanager
def connected():
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        yield one, other


@pytest.fixture
def pair():
    with connected() as both:
        yield both


def received(link, num):
    """The next frames of a link."""
    found = []
    link.connection.setblocking(True)
    while len(found) < num:
        found += link.receive()
    return [(kind, bytes(body)) for kind, body in found]


def body(size):
    return bytes(i * 7 % 251 for i in range(size % 1000)).ljust(size, b"x")


@given(frames, st.integers(1, 70_000))
def test_pieces_of_any_size_make_the_same_frames(sizes, piece):
    expected = [(kind, body(size)) for kind, size in sizes]
    stream = b"".join(struct.pack("<QB", len(each), kind) + each for kind, each in expected)
    piece = max(piece, len(stream) // 100)
    with connected() as (one, other), ThreadPoolExecutor(1) as reading:
        arriving = reading.submit(received, Link(other), len(expected))
        for start in range(0, len(stream), piece):
            one.sendall(stream[start : start + piece])
        assert arriving.result() == expected


def test_parts_of_any_kind_are_one_body(pair):
    sender, receiver = map(Link, pair)
    numbers = array.array("d", [1.5, 2.5])
    sender.send(7, [b"ab", memoryview(numbers), memoryview(b""), b""])
    assert received(receiver, 1) == [(7, b"ab" + numbers.tobytes())]


def test_a_hundred_parts_are_one_body(pair):
    sender, receiver = map(Link, pair)
    sender.send(1, [bytes([i]) for i in range(200)])
    while sender.has_rest:
        sender.flush()
    assert received(receiver, 1) == [(1, bytes(range(200)))]


def test_the_rest_is_kept_in_order(pair):
    sender, receiver = map(Link, pair)
    big = body(BIG)
    sender.send(1, [big])
    sender.send(2, [b"after"])
    assert sender.has_rest
    _, found = together(lambda: flush(sender), lambda: received(receiver, 2))
    assert found == [(1, big), (2, b"after")]


def flush(link):
    while link.has_rest:
        link.flush()


def test_the_callers_memory_may_change_after_a_send(pair):
    sender, receiver = map(Link, pair)
    memory = bytearray(b"a" * BIG)
    sender.send(1, [memoryview(memory)])
    sender.send(2, [memoryview(memory)])
    memory[:] = b"b" * len(memory)
    _, found = together(lambda: flush(sender), lambda: received(receiver, 2))
    assert [set(each) for _, each in found] == [set(b"a"), set(b"a")]


def test_a_closed_connection_is_none(pair):
    link = Link(pair[0])
    assert link.receive() == []
    pair[1].close()
    link.connection.setblocking(True)
    assert link.receive() is None


def test_nothing_waits_for_a_broken_connection(pair):
    link = Link(pair[0])
    link.send(1, [body(BIG)])
    pair[1].close()
    flush(link)
    link.send(1, [b"late"])
    assert link.is_broken
    assert not link.has_rest


def test_what_was_sent_last_survives_unread_bytes(pair):
    one, other = map(Link, pair)
    other.send(1, [b"never read"])
    num_sent = 0
    while not one.has_rest:  # more than the other side has room for, as long as it reads nothing
        one.send(2, [bytes(100_000)])
        num_sent += 1
    one.close()
    assert received(other, num_sent - 1) == [(2, bytes(100_000))] * (num_sent - 1)
    while (frames := other.receive()) == []:  # pieces of the last one
        pass
    assert frames is None


class Struck(BaseException):
    """Ctrl-C."""


def struck(call, number):
    """Call with Ctrl-C before the ``number``-th instruction of link.py; whether it came that far."""
    left = number

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.endswith("peers/link.py"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise Struck
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Struck:
        return True
    finally:
        sys.settrace(before)
    return False


def in_parts(link, whole):
    link.send(1, [whole[:7], whole[7:]])


def in_one_piece(link, whole):
    link.send_small(1, whole)


@pytest.mark.parametrize("send", [in_parts, in_one_piece])
@pytest.mark.parametrize("size", [10, 5_000_000])
def test_ctrl_c_tears_no_frame(pair, size, send):
    sender, receiver = map(Link, pair)
    big, number = body(size), 1
    with ThreadPoolExecutor(1) as reading:
        while struck(lambda: send(sender, big), number):
            sender.send(2, [b"marker"])
            arriving = reading.submit(until_marker, receiver)
            flush(sender)
            assert arriving.result() in ([(1, big), (2, b"marker")], [(2, b"marker")])
            number += 1
    assert number > 50


def until_marker(link):
    found = received(link, 1)
    return found if found[-1][0] == 2 else found + received(link, 1)
