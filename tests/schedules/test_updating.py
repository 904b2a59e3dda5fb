"""Schedules that update weights on the way have one picture; what differs is which versions their forwards use."""

import pytest

from pipeloom.ir.versions import used_versions
from pipeloom.schedules import schedule

LAST_STAGE = {
    "pipedream": (0, 1, 2, 3, 4, 5, 6, 7),
    "pipedream-vertical-sync": (0, 0, 0, 0, 1, 2, 3, 4),
    "pipedream-2bw": (0, 0, 0, 0, 0, 0, 0, 0),
}
FIRST_STAGE = {**LAST_STAGE, "pipedream": (0, 0, 0, 0, 1, 2, 3, 4)}


@pytest.mark.parametrize("name", LAST_STAGE)
def test_forwards_use_the_versions_that_the_docstrings_say(name):
    used = used_versions(schedule(name, num_ranks=4, num_microbatches=8))
    assert tuple(used[3, i] for i in range(8)) == LAST_STAGE[name]
    assert tuple(used[0, i] for i in range(8)) == FIRST_STAGE[name]


def test_a_third_batch_of_2bw_uses_the_weights_after_the_first():
    used = used_versions(schedule("pipedream-2bw", num_ranks=4, num_microbatches=12))
    assert {used[stage, i] for stage in range(4) for i in range(8)} == {0}
    assert {used[stage, i] for stage in range(4) for i in range(8, 12)} == {1}
