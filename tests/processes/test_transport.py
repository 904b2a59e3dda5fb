"""What a rank sends is like what is waited for; otherwise it is not sent."""

import contextlib

import pytest
import torch

from pipeloom.errors import BatchError
from pipeloom.ir import Action, Kind, Links, Placement, Schedule
from pipeloom.ir.notation import parse_action
from pipeloom.ir.relations import counterpart
from pipeloom.passes import add_transfers
from pipeloom.processes.post import Call
from pipeloom.processes.transport import DistributedTransport
from pipeloom.runtime.boundary import Gradients, Message
from pipeloom.schedules import schedule


class Mailbox:
    """A post that keeps everything in this process."""

    def __init__(self):
        self.parcels = {}

    def begin(self, call):
        self.parcels.clear()

    def give(self, peer, key, parcel):
        self.parcels[key] = (peer, parcel)

    def get(self, peer, key):
        return self.parcels[key][1]


@pytest.fixture
def transport():
    made = DistributedTransport(Mailbox())
    made.begin(add_transfers(schedule("1f1b", num_ranks=2, num_microbatches=2)), Call(1, 0, 0))
    return made


SEND_F, RECV_F = Action(Kind.SEND_F, 0, 1), Action(Kind.RECV_F, 1, 1)
SEND_B, RECV_B = Action(Kind.SEND_B, 1, 1), Action(Kind.RECV_B, 0, 1)


@pytest.mark.parametrize(
    "value", [torch.ones(3, requires_grad=True), {"x": torch.ones(2), "n": 3}, (torch.ones(1), None)]
)
def test_a_message_arrives_whole(transport, value):
    message, _ = Message.of(value)
    transport.post(RECV_F)
    transport.send(SEND_F, message)
    found = transport.take(RECV_F)
    assert str(found.value()) == str(message.value())
    assert found.needs_grad == message.needs_grad
    assert transport.peak_live_slots == 1


def test_both_ends_use_one_key_and_know_each_other(transport):
    transport.send(SEND_F, Message.of(torch.ones(1))[0])
    assert list(transport._post.parcels) == [b"1RECV_F1"]
    assert transport._post.parcels[b"1RECV_F1"][0] == 1


@pytest.mark.parametrize("grad", [torch.ones(4), torch.ones(3, dtype=torch.float64)])
def test_a_gradient_that_does_not_fit_is_not_sent(transport, grad):
    transport.send(SEND_F, Message.of(torch.ones(3, requires_grad=True))[0])
    transport.take(RECV_F)
    with pytest.raises(
        BatchError, match=r"stage 1 received is float\d\d\(\d,\), but the leaf is float32\(3,\); it was not"
    ):
        transport.send(SEND_B, Gradients((grad,), is_apart=False))
    assert b"0RECV_B1" not in transport._post.parcels


@pytest.mark.parametrize("is_apart", [False, True])
def test_gradients_say_whether_they_are_apart(transport, is_apart):
    transport.send(SEND_F, Message.of((torch.ones(3, requires_grad=True), torch.ones(2)))[0])
    transport.take(RECV_F)
    transport.send(SEND_B, Gradients((torch.ones(3), None), is_apart=is_apart))
    found = transport.take(RECV_B)
    assert found.is_apart is is_apart
    assert found.leaves[0].tolist() == [1.0] * 3
    assert found.leaves[1] is None


# Links

SKIPS = Links(forward=((0, 2), (0, 3), (1, 3)), backward=((3, 1), (2, 0)))


def linked(*ranks):
    """A transport for stages on these ranks, with links; nobody computes, so nothing stands in the programs."""
    made = DistributedTransport(Mailbox())
    placement = Placement.of(ranks)
    made.begin(Schedule(placement, ((),) * placement.num_ranks, 2, links=SKIPS), Call(1, 0, 0))
    return made


def test_skips_do_not_mix_with_the_chain():
    """One rank sends and one receives, and all is of one micro-batch: only the stages at both ends differ."""
    transport = linked(0, 0, 1, 1)
    sends = [parse_action(text) for text in ("0SEND_F1>2", "0SEND_F1>3", "1SEND_F1", "1SEND_F1>3")]
    for value, send in enumerate(sends):
        transport.send(send, Message.of(torch.tensor([value]))[0])
    found = [transport.take(counterpart(send)).leaves[0].item() for send in sends]
    assert found == [0, 1, 2, 3]
    assert set(transport._post.parcels) == {b"2RECV_F1<0", b"3RECV_F1<0", b"2RECV_F1", b"3RECV_F1<1"}


@pytest.mark.parametrize(("text", "rank"), [("0SEND_F1>3", 3), ("3SEND_B1>1", 1)])
def test_skips_go_to_the_rank_of_their_peer(text, rank):
    transport = linked(0, 1, 2, 3)
    transport.send(parse_action(text), Gradients((torch.ones(1),), is_apart=False))
    assert [peer for peer, _ in transport._post.parcels.values()] == [rank]


def test_gradient_of_what_came_from_elsewhere_is_sent():
    """Stage 3 got three values of one kind, and sends to stage 1 the gradient of another."""
    transport = linked(0, 1, 2, 3)
    for receive in ("3RECV_F1", "3RECV_F1<0", "3RECV_F1<1"):
        send = counterpart(parse_action(receive))
        transport.send(send, Message.of(torch.ones(3, requires_grad=True))[0])
        transport.take(parse_action(receive))
    transport.send(parse_action("3SEND_B1>1"), Gradients((torch.ones(2), torch.ones(3)), is_apart=False))
    assert transport.take(parse_action("1RECV_B1<3")).leaves[0].shape == (2,)


@pytest.mark.parametrize(
    ("stage", "is_checked"),
    [(1, True), (2, False), (3, False), (4, True)],
    ids=["chain", "in-and-out", "in-twice", "chain-after-them"],
)
def test_gradients_are_checked_where_all_of_them_go_back(stage, is_checked):
    transport = linked(0, 1, 2, 3, 4)
    receive, send_back = Action(Kind.RECV_F, stage, 0), Action(Kind.SEND_B, stage, 0)
    transport.send(counterpart(receive), Message.of(torch.ones(3, requires_grad=True))[0])
    transport.take(receive)
    expected = pytest.raises(BatchError, match="it was not sent") if is_checked else contextlib.nullcontext()
    with expected:
        transport.send(send_back, Gradients((torch.ones(2),), is_apart=False))
    assert (f"{stage - 1}RECV_B0".encode() in transport._post.parcels) is not is_checked
