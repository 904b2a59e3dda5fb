"""What a rank says of itself."""

from types import SimpleNamespace

import pytest

from pipeloom.processes.whereabouts import Whereabouts


@pytest.mark.parametrize("is_post_busy", [False, True])
@pytest.mark.parametrize("has_unread", [False, True])
def test_a_rank_with_something_unread_is_busy(is_post_busy, has_unread):
    where = Whereabouts(0, 2)
    assert not where.state().is_busy
    where.collective = SimpleNamespace(missing=[1], has_unread=has_unread)
    assert where.state().is_busy == has_unread
    where.post = SimpleNamespace(waiting=None, is_busy=is_post_busy)
    assert where.state().is_busy == (has_unread or is_post_busy)
    assert where.state().waits_for == 1
