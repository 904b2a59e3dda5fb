"""Channels in one process: in order, without waiting to send, counted, and woken when a step ends."""

import threading

import pytest

import pipeloom as pl
from pipeloom.ir import Action, Kind, Placement, Schedule
from pipeloom.ir.notation import parse_action
from pipeloom.ir.relations import channel_of, counterpart
from pipeloom.passes import add_transfers
from pipeloom.runtime.transport import Aborted, LocalTransport

LOWERED = add_transfers(pl.schedule("gpipe", num_ranks=3, num_microbatches=3))
LIMIT_S = 30


@pytest.fixture
def transport():
    channels = {channel_of(action, LOWERED) for action in LOWERED if action.kind.is_send}
    return LocalTransport(LOWERED, channels)


def send(stage, microbatch, kind=Kind.SEND_F):
    return Action(kind, stage, microbatch)


def receive(stage, microbatch, kind=Kind.RECV_F):
    return Action(kind, stage, microbatch)


def test_message_arrives_as_it_is(transport):
    message = object()
    transport.send(send(0, 1), message)
    transport.post(receive(1, 1))
    assert transport.take(receive(1, 1)) is message


def test_messages_are_taken_in_any_order(transport):
    """A consumer may come out of order; what arrives before its own message waits for its consumer."""
    for microbatch in range(3):
        transport.post(receive(1, microbatch))
        transport.send(send(0, microbatch), microbatch)
    assert [transport.take(receive(1, microbatch)) for microbatch in (2, 0, 1)] == [2, 0, 1]


def test_directions_do_not_mix(transport):
    transport.send(send(1, 0), "forward")
    transport.send(send(2, 0, Kind.SEND_B), "backward")
    transport.send(send(1, 0, Kind.SEND_B), "further back")
    assert transport.take(receive(1, 0, Kind.RECV_B)) == "backward"
    assert transport.take(receive(2, 0)) == "forward"
    assert transport.take(receive(0, 0, Kind.RECV_B)) == "further back"


def test_skips_do_not_mix_with_the_chain():
    """One rank sends and one receives, and all is of one micro-batch: only the stages at both ends differ."""
    transport = LocalTransport(Schedule(Placement.of((0, 0, 1, 1)), ((), ()), 1), {(0, 1), (1, 0)})
    sends = ["0SEND_F0>2", "0SEND_F0>3", "1SEND_F0>3", "1SEND_F0", "2SEND_B0", "3SEND_B0>0", "3SEND_B0>1", "2SEND_B0>0"]
    for text in sends:
        transport.send(parse_action(text), text)
    transport.abort()  # or one that is kept under another's key would be waited for without end
    taken = {text: transport.take(counterpart(parse_action(text))) for text in reversed(sends)}
    assert taken == {text: text for text in sends}


def test_take_waits_for_its_message(transport):
    taken = []
    taker = threading.Thread(target=lambda: taken.append(transport.take(receive(1, 0))))
    taker.start()
    assert taken == []
    transport.send(send(0, 0), "late")
    taker.join(LIMIT_S)
    assert taken == ["late"]


def test_slots_live_from_post_to_take(transport):
    for microbatch in range(3):
        transport.post(receive(1, microbatch))
    assert transport.peak_live_slots == [0, 3, 0]
    transport.send(send(0, 0), None)
    transport.take(receive(1, 0))
    transport.post(receive(2, 0))
    transport.post(receive(1, 0, Kind.RECV_B))
    assert transport.peak_live_slots == [0, 3, 1]


@pytest.mark.parametrize("is_waiting", [False, True])
def test_abort_wakes_who_waits_now_or_later(transport, is_waiting):
    outcomes = []

    def take():
        try:
            transport.take(receive(1, 0))
        except Aborted:
            outcomes.append("aborted")

    taker = threading.Thread(target=take)
    if is_waiting:
        taker.start()
    transport.abort()
    if not is_waiting:
        taker.start()
    taker.join(LIMIT_S)
    assert outcomes == ["aborted"]
    assert not taker.is_alive()


def test_abort_reaches_every_channel(transport):
    transport.abort()
    for waiting in (receive(1, 0), receive(2, 0), receive(0, 0, Kind.RECV_B), receive(1, 0, Kind.RECV_B)):
        with pytest.raises(Aborted, match=r"^$"):
            transport.take(waiting)


def test_sending_after_an_abort_does_not_fail(transport):
    """The rank that failed last may still post what nobody will take."""
    transport.abort()
    transport.send(send(0, 0), "unread")
    with pytest.raises(Aborted, match=r"^$"):
        transport.take(receive(1, 0))
