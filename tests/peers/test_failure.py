"""One cause on all ranks: the first one, and what only follows from it nowhere."""

from queue import SimpleQueue

import pytest

from pipeloom.errors import PeerFailed
from pipeloom.peers import Cause, failure, kinds
from tests.peers.ranks import LONG_S, Rank, meshes, raised, ranks, together, until

BAD = Cause(1, "exception", "stage 1, micro-batch 3, action 1F3", "ValueError: bad", "Traceback:\n  line 7")


def causes(found):
    """The causes that hold, once there is one everywhere."""
    until(lambda: all(rank.failures.cause for rank in found))
    return {rank.failures.cause for rank in found}


def own(rank, kind="exception", text="of its own"):
    """A cause that happens to a rank itself."""
    return Cause(rank.mesh.rank, kind, "here", text)


def test_a_cause_reaches_all_ranks():
    with ranks(4) as found:
        assert found[1].failures.tell(BAD) == BAD
        assert causes(found) == {BAD}


@pytest.mark.parametrize("rank", [0, 2])
def test_other_ranks_raise_it_with_the_same_last_lines(rank):
    with ranks(3) as found:
        found[1].failures.tell(BAD)
        until(lambda: found[rank].failures.cause)
        error = raised(found[rank].failures.check)
    assert isinstance(error, PeerFailed)
    assert str(error) == (
        f"rank {rank} stops, because rank 1 failed\n\n"
        "Traceback:\n  line 7\nrank 1, stage 1, micro-batch 3, action 1F3: ValueError: bad"
    )


def test_its_own_exception_is_not_raised_again():
    with ranks(2) as (_, other):
        other.failures.check()
        other.failures.tell(BAD)
        other.failures.check()
        assert other.failures.cause == BAD


def test_nor_where_a_rank_that_dies_of_it_says_so_last():
    """It ended before this rank's own 0.2 s were over, and its last words, a lower rank's, took the place of the same
    cause: one time in two the user's exception became "rank 2 stops, because rank 2 failed".
    """
    with ranks(2) as (one, other):
        other.failures.on_failure(lambda: one.failures.say_last_words(BAD))
        assert other.failures.tell(BAD) == BAD
        until(lambda: other.failures.gone)
        other.failures.check()


def test_a_rank_that_is_told_to_be_slow_raises_that():
    with ranks(2) as (one, other):
        one.failures.tell(Cause(1, "stalled", "in a loop", "no progress"))
        until(lambda: other.failures.cause)
        with pytest.raises(PeerFailed, match=r"rank 1, in a loop: no progress$"):
            other.failures.check()


def test_the_first_cause_holds():
    with ranks(2) as (one, other):
        first = one.failures.tell(own(one))
        until(lambda: other.failures.cause)
        assert other.failures.tell(own(other)) == first
        assert raised(other.failures.check).cause == first


def test_of_causes_at_the_same_time_the_lowest_rank_tells():
    with ranks(3) as found:
        told = together(*[lambda rank=rank: rank.failures.tell(own(rank)) for rank in found])
        assert set(told) == causes(found) == {own(found[0])}


def test_a_lost_peer_is_the_same_cause_everywhere():
    with ranks(4) as found:
        found[2].mesh.close()
        (cause,) = causes([found[0], found[1], found[3]])
    assert (cause.rank, cause.kind, cause.place) == (2, "lost", "at the place of 2")
    assert cause.message == f"{found[0].mesh.names[2]} is gone: its process ended without a word"


def test_of_two_deaths_all_ranks_name_the_same():
    with ranks(4) as found:
        together(found[2].mesh.close, found[1].mesh.close)
        living = [found[0], found[3]]
        causes(living)
        first, second = (raised(rank.failures.check).cause for rank in living)
    assert first == second
    assert first.rank in (1, 2)


def test_a_death_is_the_cause_of_what_follows_from_it():
    with ranks(3) as found:

        def fail():
            found[1].mesh.close()
            return found[2].failures.tell(own(found[2], text="RuntimeError: Connection closed by peer"))

        (told,) = together(fail)
        assert (told.rank, told.kind) == (1, "lost")
        assert causes([found[0], found[2]]) == {told}


def test_a_death_takes_the_place_of_what_was_told_before_it(monkeypatch):
    monkeypatch.setattr(failure, "_SETTLE_S", 2.0)
    with meshes(3) as made:
        found = [Rank(mesh) for mesh in made]
        made[0].start(), made[2].start()  # rank 1 hears nothing, so its death has nothing to do with that
        echo = own(found[0], text="RuntimeError: Connection closed by peer")
        told, _ = together(lambda: found[0].failures.tell(echo), made[1].close)
        assert (told.rank, told.kind) == (1, "lost")
        assert raised(found[2].failures.check).cause == told


def test_the_word_of_a_dying_process_comes_before_its_death():
    with ranks(3) as found:
        found[1].failures.tell(BAD)
        found[1].failures.say_last_words(BAD)
        found[1].mesh.close()
        assert causes(found) == {BAD}
        until(lambda: all(1 in rank.failures.gone for rank in (found[0], found[2])))
        assert found[0].failures.death == BAD


def test_a_rank_that_ends_in_order_is_not_lost():
    with ranks(2) as (one, other):
        one.mesh.broadcast(kinds.BYE)
        one.mesh.close()
        until(lambda: other.failures.ended == {0})
        until(lambda: other.mesh._links[0].is_broken)
        assert other.failures.cause is other.failures.death is None
        other.failures.expect({1}, "itself")
        with pytest.raises(
            PeerFailed, match=r"rank 0 ended \(or closed its pipeline\) while rank 1 waits for step 3: "
        ):
            other.failures.expect({0, 1}, "step 3")


def test_after_forgetting_all_is_well():
    with ranks(2) as found:
        found[1].failures.tell(BAD)
        causes(found)
        for rank in found:
            rank.failures.forget()
            rank.failures.check()
        assert [rank.failures.cause for rank in found] == [None, None]
        assert found[0].failures.tell(own(found[0])) == own(found[0])


def test_a_cause_of_a_later_step_waits_for_it():
    with ranks(2) as (one, other):
        one.failures.forget()
        one.failures.tell(own(one))
        until(lambda: other.failures._ahead)
        other.failures.check()
        other.failures.forget()
        assert raised(other.failures.check).cause == own(one)


def test_a_cause_of_an_earlier_step_is_dropped():
    with ranks(2) as (one, other):
        other.failures.forget()
        one.failures.tell(own(one))
        one.mesh.send(1, 1, b"after it")
        other.take(1)
        other.failures.check()
        assert other.failures.cause is None


def test_a_death_cannot_be_forgotten():
    with ranks(3) as found:
        found[1].failures.tell(BAD)
        causes(found)
        found[1].mesh.close()
        until(lambda: 1 in found[0].failures.gone)
        found[0].failures.forget()
        with pytest.raises(PeerFailed, match=r"rank 1, at the place of 1: rank 1 \(pid .* without a word$"):
            found[0].failures.check()


def test_who_waits_is_woken():
    with ranks(2) as (one, other):
        woken = SimpleQueue()
        one.failures.on_failure(wake := lambda: woken.put(one.failures.cause))
        other.failures.tell(BAD)
        assert woken.get(timeout=LONG_S) == BAD
        one.failures.on_failure(wake)
        assert woken.get_nowait() == BAD


def test_who_waits_is_woken_by_an_end():
    with ranks(2) as (one, other):
        woken = SimpleQueue()
        one.failures.on_failure(lambda: woken.put(set(one.failures.ended)))
        other.mesh.broadcast(kinds.BYE)
        assert woken.get(timeout=LONG_S) == {1}


def test_a_death_is_reported_to_who_asked():
    with ranks(2) as (one, other):
        deaths = SimpleQueue()
        one.failures.on_death(lambda: deaths.put(one.failures.cause.kind))
        other.mesh.close()
        assert deaths.get(timeout=LONG_S) == "lost"


def test_the_cause_of_a_peer_is_reported_as_it_is():
    with ranks(2) as (one, _):
        assert one.failures.report(PeerFailed("x", cause=BAD)) == BAD
        assert one.failures.report(ValueError("bad")).line == "rank 0, at the place of 0: ValueError: bad"
