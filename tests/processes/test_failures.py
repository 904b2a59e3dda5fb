"""When something dies: all ranks end, soon, and with the same cause in their last line."""

import re

import pytest

from tests.processes.hurt import Hurt, train
from tests.processes.ranks import start

MOMENTS = ("warm-up", "steady", "cool-down", "optimizer", "checkpoint")
HUNG_S = 30.0
"""What a busy machine may take for what takes less than 2 s; no limit of ours is so short."""
PLACES = {"warm-up": "action 1F0", "steady": "action 1B2", "cool-down": "action 1B5"}


def last_line(ranks, rank):
    return re.sub(r"^\[rank\d\]: ", "", ranks.last_lines(rank)[-1])


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_exception_ends_every_rank_with_its_own_words(moment, tmp_path):
    ranks = start(train, 3, tmp_path, Hurt("raise", moment, tmp_path), 3)
    assert ranks.wait() == [1, 1, 1]
    assert ranks.seconds_to_end < HUNG_S
    assert len({last_line(ranks, rank) for rank in range(3)}) == 1
    assert last_line(ranks, 0).endswith("ValueError: the user's own mistake")
    assert PLACES.get(moment, "rank 1, outside a step, after step 1") in last_line(ranks, 0)
    assert all("in strike" in ranks.output(rank) for rank in range(3)), "the user's traceback"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_process_ends_every_rank(moment, tmp_path):
    ranks = start(train, 3, tmp_path, Hurt("kill", moment, tmp_path), 3)
    assert ranks.wait() == [1, -9, 1]
    assert ranks.seconds_to_end < HUNG_S
    assert last_line(ranks, 0) == last_line(ranks, 2)
    assert re.match(r"rank 1, .* is gone: its process ended without a word", last_line(ranks, 0))


@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_all_are_gone_within_two_seconds(kind, tmp_path):
    """The best of five: other tests may have the cores meanwhile."""
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        ranks = start(train, 3, folder, Hurt(kind, "steady", folder), 3)
        ranks.wait()
        if ranks.seconds_to_end < 2.0:
            return
    pytest.fail(f"it took {ranks.seconds_to_end:.1f} s, and more than 2 s five times")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stall_ends_every_rank_with_a_report(moment, tmp_path):
    ranks = start(train, 3, tmp_path, Hurt("stall", moment, tmp_path, limit_s=4.0), 3)
    assert ranks.wait() == [1, 1, 1]
    assert ranks.seconds_to_end < 4.0 + HUNG_S, "the limit, an answer, and the time to end"
    assert len({last_line(ranks, rank) for rank in range(3)}) == 1
    assert re.match(
        r"rank 1, .*: keeps the others waiting; rank \d has waited 4 s \(the limit\) for", last_line(ranks, 0)
    )
    for rank in range(3):
        assert "which waits for nobody" in ranks.output(rank)
        assert "time.sleep(3600)" in ranks.output(rank), "the stack of the rank to blame"


def test_a_process_that_is_stopped_for_a_while_is_no_alarm(tmp_path):
    ranks = start(train, 3, tmp_path, Hurt("stop", "steady", tmp_path), 3)
    assert ranks.wait() == [0, 0, 0]
    assert [ranks.last_lines(rank)[-1] for rank in range(3)] == ["trained"] * 3
