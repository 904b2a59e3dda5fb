"""What a rank sends is like what is waited for; otherwise it is not sent."""

import pytest
import torch

from pipeloom.errors import BatchError
from pipeloom.ir import Action, Kind
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
