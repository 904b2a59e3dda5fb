"""What all ranks say at one place; that it is the same place; and what ends a wait."""

import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import PeerFailed, ProcessError
from pipeloom.peers import Cause, kinds
from tests.peers.ranks import raised, ranks, together, until

HEADER = struct.Struct("<IIH")
"""Of what is said: epoch, number, length of the place."""


def on_all(found, call):
    """Call something with every rank, at the same time."""
    return together(*[lambda rank=rank: call(rank) for rank in found])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_payloads_come_in_rank_order(num_ranks):
    with ranks(num_ranks) as found:
        gathered = on_all(found, lambda rank: rank.collective.all_gather(bytes([rank.mesh.rank]), "it"))
    assert gathered == [[bytes([rank]) for rank in range(num_ranks)]] * num_ranks


@settings(max_examples=10)
@given(st.lists(st.binary(max_size=2000), min_size=1, max_size=30))
def test_calls_do_not_mix(payloads):
    def run(rank):
        return [rank.collective.all_gather(each + bytes([rank.mesh.rank]), f"call {each!r}") for each in payloads]

    with ranks(2) as found:
        assert on_all(found, run) == [[[each + b"\0", each + b"\1"] for each in payloads]] * 2


def test_a_rank_may_be_a_call_ahead():
    with ranks(2) as (one, other):
        one.mesh.broadcast(kinds.GATHER, HEADER.pack(0, 0, 3) + b"one" + b"first")
        one.mesh.broadcast(kinds.GATHER, HEADER.pack(0, 1, 3) + b"two" + b"second")
        until(lambda: other.collective._queue.qsize() == 2)
        assert other.collective.all_gather(b"a", "one") == [b"first", b"a"]
        assert other.collective.all_gather(b"b", "two") == [b"second", b"b"]


def test_different_places_are_named_on_all_ranks():
    whats = ["the end of step 7", "the end of step 7", "clip_grad_norm_ after step 6"]
    with ranks(3) as found:
        errors = on_all(found, lambda rank: raised(lambda: rank.collective.all_gather(b"", whats[rank.mesh.rank])))
    assert [type(error) for error in errors] == [ProcessError] * 3
    assert {error.message for error in errors} == {
        "the ranks are at different places: rank 0 is at 'the end of step 7', rank 2 at 'clip_grad_norm_ after step 6'"
    }


def test_a_new_epoch_drops_what_is_old():
    with ranks(2) as (one, other):
        other.failures.tell(Cause(1, "exception", "here", "ValueError: bad"))
        assert isinstance(raised(lambda: one.collective.all_gather(b"old", "it")), PeerFailed)
        for rank in (one, other):
            rank.failures.forget()
            rank.collective.epoch = 1
        assert on_all([one, other], lambda rank: rank.collective.all_gather(b"new", "it")) == [[b"new"] * 2] * 2
        assert [len(rank.collective._said) for rank in (one, other)] == [0, 0]


def test_a_new_epoch_keeps_what_came_early():
    with ranks(2) as (one, other):
        one.collective.epoch = 5
        gathering = [lambda: one.collective.all_gather(b"a", "it"), lambda: early(other)]
        assert together(*gathering) == [[b"a", b"b"]] * 2


def early(rank):
    """Begin an epoch only after the other rank's message of it has been read."""
    until(lambda: not rank.collective._queue.empty())
    rank.collective._sort(rank.collective._queue.get())
    rank.collective.epoch = 5
    return rank.collective.all_gather(b"b", "it")


def test_a_failure_ends_a_wait():
    cause = Cause(1, "exception", "here", "ValueError: bad")
    with ranks(3) as found:
        errors = together(
            lambda: raised(lambda: found[0].collective.all_gather(b"", "it")),
            lambda: raised(lambda: found[2].collective.all_gather(b"", "it")),
            lambda: found[1].failures.tell(cause),
        )
    assert [error.cause for error in errors[:2]] == [cause, cause]
    with pytest.raises(PeerFailed, match=r"rank 1, here: ValueError: bad$"):
        raise errors[0]


def test_a_rank_that_has_ended_is_not_waited_for():
    with ranks(3) as found:
        found[0].mesh.broadcast(kinds.BYE)
        errors = on_all(found[1:], lambda rank: raised(lambda: rank.collective.all_gather(b"", "the end of step 7")))
    assert errors[0].cause == errors[1].cause
    assert (errors[0].cause.rank, errors[0].cause.kind) == (0, "ended")
    with pytest.raises(
        PeerFailed, match=r"rank 0 ended \(or .*\) while rank [12] waits for the end of step 7: the ranks "
    ):
        raise errors[0]


@pytest.mark.parametrize("how", ["ended", "failed"])
def test_what_was_said_before_an_end_counts(how):
    with ranks(2) as (one, other):
        one.mesh.broadcast(kinds.GATHER, HEADER.pack(0, 0, 2) + b"it" + b"last")
        if how == "ended":
            one.mesh.broadcast(kinds.BYE)
            until(lambda: other.failures.ended)
        else:
            one.failures.tell(Cause(0, "exception", "here", "ValueError: bad"))
        assert other.collective.all_gather(b"own", "it") == [b"last", b"own"]
        with pytest.raises(PeerFailed, match="rank 0"):
            other.collective.all_gather(b"own", "the next")


PART = HEADER.pack(0, 0, 2) + b"it"


def fails_after_the_call(one, other, failing):
    """One rank's part of a call is on its way to a second one when a third, which has it already, fails."""
    one.mesh.send(2, kinds.GATHER, PART + b"a")
    other.mesh.send(2, kinds.GATHER, PART + b"b")
    assert failing.collective.all_gather(b"c", "it") == [b"a", b"b", b"c"]
    failing.failures.tell(Cause(2, "exception", "here", "ValueError: bad"))
    until(lambda: other.failures.cause)


def test_who_failed_after_a_call_does_not_end_it_for_others():
    """Four ranks made a pipeline that all of them are refused, with the same error. Rank 3 was through the first call,
    failed and told it, before rank 0's part had come to rank 1: so there it was `PeerFailed`, which the user's
    `except` did not name, and the run ended.
    """
    with ranks(3) as (one, other, failing):
        fails_after_the_call(one, other, failing)

        def late():
            time.sleep(0.3)  # longer than causes take to settle
            return one.mesh.send(1, kinds.GATHER, PART + b"a")

        assert together(lambda: other.collective.all_gather(b"b", "it"), late)[0] == [b"a", b"b", b"c"]
        with pytest.raises(PeerFailed, match="rank 2"):
            other.collective.all_gather(b"", "the next")


def test_a_part_of_one_who_is_gone_is_not_waited_for():
    with ranks(3) as (one, other, failing):
        fails_after_the_call(one, other, failing)
        one.mesh.close()
        with pytest.raises(PeerFailed, match="rank 2"):
            other.collective.all_gather(b"b", "it")


def test_a_rank_that_does_not_come_is_a_stall_on_all():
    with ranks(3, limit_s=0.1) as found:
        errors = on_all(found[:2], lambda rank: raised(lambda: rank.collective.all_gather(b"", "the end of step 7")))
        until(lambda: found[2].failures.cause)
        with pytest.raises(PeerFailed, match=r"rank [01] has waited 0\.1 s for the end of step 7 from rank"):
            found[2].failures.check()
    assert {error.cause for error in errors} == {found[0].failures.cause}


def test_a_stall_is_described_by_who_can():
    with ranks(2, limit_s=0.05) as (one, _):
        asked = []
        one.collective.on_stall = lambda *given: asked.append(given) or Cause(1, "stalled", "in a loop", "slow")
        with pytest.raises(PeerFailed, match=r"rank 1, in a loop: slow$"):
            one.collective.all_gather(b"", "it")
    assert asked == [([1], "it")]


def test_what_comes_while_a_rank_looks_is_known_to_be_there(monkeypatch):
    """On a busy machine a rank looked whether all wait for each other while what it waited for came: all failed."""
    monkeypatch.setattr("pipeloom.peers.waiting.LOOK_S", 0.0)
    seen = []
    with ranks(2) as (one, other):

        def look():
            seen.append(one.collective.has_unread)
            other.mesh.broadcast(kinds.GATHER, HEADER.pack(0, 0, 2) + b"it" + b"b")
            until(lambda: one.collective.has_unread)

        one.collective.look = look
        assert one.collective.all_gather(b"a", "it") == [b"a", b"b"]
        assert not one.collective.has_unread
    assert seen == [False]
