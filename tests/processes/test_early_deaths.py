"""A rank that fails before the ranks have met ends all of them, soon, and with its words.

Connections came with the stages, once a model was cut: until then nobody watched. A rank that raised in the dry run, or
was killed in it, left the others waiting 60 s for its address, to end with "1 did not come"; and a store that died with
rank 0 was `DistNetworkError: Broken pipe` on the rest.
"""

import re

import pytest

from tests.processes import early
from tests.processes.early import Spoiler
from tests.processes.ranks import start

HUNG_S = 30.0
"""What a busy machine may take for what takes less than 2 s; half of the limit."""
OWN_WORDS = "ValueError: the user's own mistake"


def last_line(ranks, rank):
    return re.sub(r"^\[rank\d\]: ", "", ranks.last_lines(rank)[-1])


def spoiled(folder, kind, moment, rank, **options):
    return start(early.trains, early.NUM_RANKS, folder, Spoiler(kind, moment, rank, folder, **options))


def the_one_last_line(ranks, who):
    """What all of these ranks say."""
    (line,) = {last_line(ranks, rank) for rank in who}
    return line


@pytest.mark.parametrize("options", [{}, {"has_example": True}, {"has_other": True}], ids=["", "example", "second"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", ["factory", "dry run"])
def test_an_exception_ends_every_rank_with_its_own_words(moment, rank, options, tmp_path):
    ranks = spoiled(tmp_path, "raise", moment, rank, **options)
    assert ranks.wait() == [1, 1, 1]
    assert ranks.seconds_to_end < HUNG_S
    assert the_one_last_line(ranks, range(3)) == f"rank {rank}, the start: {OWN_WORDS}"
    assert all("in come_to" in ranks.output(each) for each in range(3)), "the user's traceback"


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        ("weights", "/no/such/folder"),
        ("schedule", "UnknownSchedule: schedule '2f2b' is unknown"),
        ("batch", "BatchError: "),
    ],
)
def test_what_one_rank_alone_is_refused_ends_every_rank(moment, words, tmp_path):
    ranks = spoiled(tmp_path, "raise", moment, 2)
    assert ranks.wait() == [1, 1, 1]
    assert ranks.seconds_to_end < HUNG_S
    line = the_one_last_line(ranks, range(3))
    assert line.startswith("rank 2, the start: pipeloom.errors.")
    assert words in line


@pytest.mark.parametrize("options", [{}, {"has_example": True}, {"has_other": True}], ids=["", "example", "second"])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("moment", ["factory", "dry run", "numbers"])
def test_a_killed_process_ends_every_rank(moment, rank, options, tmp_path):
    """Also rank 0, which takes the store with it."""
    ranks = spoiled(tmp_path, "kill", moment, rank, **options)
    assert ranks.wait() == [-9 if each == rank else 1 for each in range(3)]
    assert ranks.seconds_to_end < HUNG_S
    line = the_one_last_line(ranks, {0, 1, 2} - {rank})
    assert re.match(rf"rank {rank}, .*rank {rank} .* is gone: its process ended without a word", line)


@pytest.mark.parametrize(("kind", "moment"), [("raise", "dry run"), ("kill", "dry run"), ("raise", "factory")])
def test_all_are_gone_within_two_seconds(kind, moment, tmp_path):
    """The best of five: other tests may have the cores meanwhile."""
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        ranks = spoiled(folder, kind, moment, 1)
        ranks.wait()
        if ranks.seconds_to_end < 2.0:
            return
    pytest.fail(f"it took {ranks.seconds_to_end:.1f} s, and more than 2 s five times")


def test_a_rank_that_exits_ends_every_rank(tmp_path):
    ranks = spoiled(tmp_path, "exit", "factory", 1)
    assert 0 not in ranks.wait()
    assert ranks.seconds_to_end < HUNG_S
    assert last_line(ranks, 0) == last_line(ranks, 2) == "rank 1, the start: SystemExit: 3"


def test_a_stall_before_the_start_is_reported_after_the_limit(tmp_path):
    ranks = spoiled(tmp_path, "stall", "dry run", 1, limit_s=3.0)
    assert ranks.wait() == [1, 1, 1]
    assert ranks.seconds_to_end < 3.0 + HUNG_S
    line = the_one_last_line(ranks, range(3))
    assert re.match(r"rank 1, the start: keeps the others waiting; rank \d has waited 3 s \(the limit\) for", line)
    assert "time.sleep(3600)" in ranks.output(0), "the stack of the rank to blame"


@pytest.mark.parametrize("rank", [0, 1])
def test_who_never_comes_is_named_after_the_limit(rank, tmp_path):
    """It was torch's limit, half an hour."""
    ranks = spoiled(tmp_path, "exit", "late", rank, limit_s=3.0)
    others = {0, 1, 2} - {rank}
    assert [ranks.wait()[each] for each in others] == [1, 1]
    assert ranks.seconds_to_end < 3.0 + HUNG_S
    for each in others:
        said = (
            rf"(waited 3 s for other ranks: {rank} did not come|rank {rank}, who keeps the store .* can't be reached)"
        )
        assert re.search(said, ranks.output(each))


def test_who_fails_between_two_pipelines_ends_those_that_wait_in_the_second(tmp_path):
    ranks = spoiled(tmp_path, "kill", "late", 1, has_other=True)
    assert ranks.wait() == [1, -9, 1]
    assert ranks.seconds_to_end < HUNG_S
    assert "is gone: its process ended without a word" in the_one_last_line(ranks, {0, 2})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_first_step_that_all_survive_may_be_tried_again(rank, tmp_path):
    ranks = start(early.tries_again, early.NUM_RANKS, tmp_path, Spoiler("raise", "dry run", rank, tmp_path))
    assert ranks.wait() == [0, 0, 0], "\n".join(map(ranks.output, range(3)))


def test_a_rank_that_catches_it_and_lives_on_keeps_nobody_waiting(tmp_path):
    ranks = start(early.goes_on_without, early.NUM_RANKS, tmp_path, Spoiler("raise", "factory", 1, tmp_path))
    assert ranks.wait() == [1, 0, 1]
    assert the_one_last_line(ranks, {0, 2}) == f"rank 1, the start: {OWN_WORDS}"


def test_pipelines_that_never_ran_are_let_go(tmp_path):
    ranks = start(early.is_closed_unused, early.NUM_RANKS, tmp_path, None)
    assert ranks.wait() == [0, 0, 0], "\n".join(map(ranks.output, range(3)))


def test_a_mistake_of_all_ranks_is_the_same_error_on_each(tmp_path):
    """Who heard of another rank's error before its own connections were complete got `PeerFailed` for it."""
    ranks = start(early.is_refused_alike, early.NUM_RANKS, tmp_path, None)
    assert ranks.wait() == [0, 0, 0], "\n".join(map(ranks.output, range(3)))
