"""Streams with a process for each rank, over gloo."""

import pytest

from tests.asynchronous import ranks
from tests.processes.ranks import start
from tests.processes.test_run_models import assert_all_pass


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_trains_with_the_bits_of_the_rule(num_ranks, tmp_path):
    assert_all_pass(start(ranks.train, num_ranks, tmp_path, num_ranks))


@pytest.mark.parametrize("what", [ranks.one_loss_is_nan, ranks.share_weights, ranks.one_cannot_make_its_optimizer])
def test_all_ranks_end(what, tmp_path):
    assert_all_pass(start(what, 4, tmp_path, 4))
