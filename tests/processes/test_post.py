"""What travels between two ranks: the same whatever way it goes, and each call by itself."""

import socket

import pytest
import torch

from pipeloom.errors import PeerFailed, ProcessError
from pipeloom.peers import Cause
from pipeloom.processes.lanes import Lanes
from pipeloom.processes.parcels import MAX_DESCRIPTIONS, Parcel
from pipeloom.processes.post import Call, Post
from tests.peers.ranks import until

FIRST, SECOND = Call(1, 7, 8), Call(2, 7, 8)


class Connection:
    """A mesh of two ranks in one thread."""

    is_busy = False

    def __init__(self):
        self.handlers, self.other, self.rank, self.num_sent = {}, None, 0, 0

    def on(self, kind, handler):
        self.handlers[kind] = handler

    def send(self, _, kind, *parts):
        self.num_sent += 1
        self.other.handlers[kind](self.rank, memoryview(bytearray(b"".join(parts))))


class Quiet:
    """Failures that can be told."""

    ended = frozenset()

    def __init__(self):
        self.is_quiet, self.wakes, self.told = True, [], None

    def on_failure(self, wake):
        self.wakes.append(wake)

    def expect(self, peers, what):
        if not self.is_quiet:
            raise PeerFailed(f"{what} of {sorted(peers)}", cause=None)

    def check(self):
        self.expect([], "it")

    def tell(self, cause):
        self.told, self.is_quiet = cause, False


def made(peer, mesh, connection, limit_s):
    mesh.rank = 1 - peer
    stalled = lambda waiting: Cause(waiting.peer, "stalled", waiting.what, "")  # noqa: E731
    post = Post(
        mesh,
        {peer: connection},
        Lanes("gloo", [0, 1], (), 1 - peer, None),
        Quiet(),
        limit_s,
        stalled,
    )
    post.begin(FIRST)
    return post


@pytest.fixture
def posts():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    meshes = [Connection(), Connection()]
    meshes[0].other, meshes[1].other = meshes[1], meshes[0]
    both = [made(1 - rank, meshes[rank], connections[rank], 0.05) for rank in range(2)]
    yield both
    for post in both:
        post.close()


COMPLEX = torch.tensor([1 + 2j, 3 - 1j])
PARCELS = {
    "one": (torch.arange(6.0).view(2, 3),),
    "bfloat16": (torch.arange(3, dtype=torch.bfloat16),),
    "no dimension": (torch.tensor(3),),
    "empty": (torch.empty(0, 3),),
    "a view": (torch.arange(12.0).view(3, 4).t(),),
    "off a cache line": (torch.arange(9.0)[1:],),
    "conjugate": (COMPLEX.conj(),),
    "negative": (COMPLEX.conj().imag,),
    "several": (torch.ones(2), None, "text", torch.zeros(3)),
    "large": (torch.arange(50_000.0),),
}


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("leaves", PARCELS.values(), ids=PARCELS)
def test_a_parcel_arrives_as_it_was_given(posts, leaves, is_direct):
    one, other = posts
    for number in range(3):  # the first one with its description, the others without
        one.give(1, b"%d" % number, Parcel(leaves, "form"), is_direct=is_direct)
    for number in range(3):
        assert str(other.get(0, b"%d" % number)) == str(Parcel(leaves, "form"))


def test_a_view_lies_as_it_lay(posts):
    posts[0].give(1, b"key", Parcel(PARCELS["a view"], None))
    (found,) = posts[1].get(0, b"key").leaves
    assert found.stride() == (1, 4)


def test_small_parcels_pass_by_the_thread_of_connections(posts):
    posts[0].give(1, b"small", Parcel((torch.ones(3),), None))
    assert posts[0]._mesh.num_sent == 0
    posts[0].give(1, b"large", Parcel((torch.ones(10_000),), None))
    posts[0].give(1, b"later", Parcel((torch.ones(3),), None), is_direct=False)
    assert posts[0]._mesh.num_sent == 2


def test_what_is_received_is_aligned_and_its_own(posts):
    sent = torch.ones(5)
    for key in (b"a", b"b", b"c"):
        posts[0].give(1, key, Parcel((sent,), None))
        sent.add_(1)
    found = [posts[1].get(0, key).leaves[0] for key in (b"c", b"a", b"b")]
    assert [each[0].item() for each in found] == [3.0, 1.0, 2.0]
    assert {each.data_ptr() % 64 for each in found} == {0}


def test_shapes_without_end_are_forgotten(posts):
    for size in range(1, MAX_DESCRIPTIONS + 3):
        posts[0].give(1, b"key", Parcel((torch.full((size,), size),), None))
        assert posts[1].get(0, b"key").leaves[0].tolist() == [size] * size
    assert len(posts[1]._known) == MAX_DESCRIPTIONS


def test_words_are_heard_between_parcels(posts):
    posts[0].give(1, b"0F1", Parcel((torch.ones(1),), None))
    posts[0].tell(1, b"the end", b"said")
    assert posts[1].hear(0, b"the end") == b"said"
    assert posts[1].get(0, b"0F1").leaves[0].item() == 1
    assert posts[1].last_heard == {0: b"0F1"}, "words are no place in a schedule"


def test_what_is_left_of_an_earlier_call_is_dropped(posts):
    posts[0].give(1, b"key", Parcel((torch.ones(1),), None))
    for post in posts:
        post.begin(SECOND)
    posts[0].give(1, b"key", Parcel((torch.zeros(1),), None))
    assert posts[1].get(0, b"key").leaves[0].item() == 0


def test_another_rank_may_begin_the_next_call_when_this_one_ends(posts):
    posts[0].begin(SECOND)
    posts[0].give(1, b"key", Parcel((torch.ones(1),), None))
    posts[1].end()
    posts[0].call, posts[0]._packed_call = FIRST, posts[1]._packed_call
    posts[0].tell(1, b"the end", b"said")
    assert posts[1].hear(0, b"the end") == b"said"
    posts[1].begin(SECOND)
    assert posts[1].get(0, b"key").leaves[0].item() == 1


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (SECOND, "rank 0 is at call 2 of the pipeline, this rank at call 1"),
        (Call(1, 9, 8), "rank 0 has another schedule, seed, step or form of inputs in call 1"),
        (Call(1, 7, 9), "rank 0 was given another batch in call 1"),
    ],
)
def test_within_a_call_all_ranks_make_the_same(posts, theirs, message):
    posts[0].begin(theirs)
    posts[0].give(1, b"key", Parcel((torch.ones(1),), None))
    with pytest.raises(ProcessError, match=message):
        posts[1].get(0, b"key")


def test_what_was_sent_before_a_failure_still_counts(posts):
    posts[0].give(1, b"key", Parcel((torch.ones(1),), None))
    posts[1]._failures.is_quiet = False
    assert posts[1].get(0, b"key").leaves[0].item() == 1
    with pytest.raises(PeerFailed, match=r"^other of"):
        posts[1].get(0, b"other")


def test_a_wait_that_is_too_long_tells_what_it_was_for(posts):
    with pytest.raises(PeerFailed, match="it"):
        posts[1].get(0, b"1RECV_F3")
    assert posts[1]._failures.told.rank == 0
    assert posts[1]._failures.told.place == "1RECV_F3"


def test_what_a_connection_does_not_take_goes_out_while_its_rank_waits(posts):
    one, other = posts
    while not one._direct.unsent:
        one.tell(1, b"many", bytes(50_000))
    one.tell(1, b"last", b"words")
    with pytest.raises(PeerFailed, match="it"):
        one.flush("the end")
    while one._direct.unsent:
        other._direct.wait(0.1)
        one._direct.wait(0.1)
    one.flush("the end")
    assert other.hear(0, b"last") == b"words"


def test_what_comes_while_a_rank_looks_is_known_to_be_there(posts, monkeypatch):
    """A rank that looks whether all wait for each other reads nothing meanwhile: what came made it no busier."""
    monkeypatch.setattr("pipeloom.peers.waiting.LOOK_S", 0.0)
    one, other = posts
    seen = []

    def look():
        seen.append(other.is_busy)
        one.give(1, b"late", Parcel((torch.ones(3),), "form"))
        until(lambda: other.is_busy)

    other.look = look
    assert torch.equal(other.get(0, b"late").leaves[0], torch.ones(3))
    assert not other.is_busy
    assert seen == [False]
