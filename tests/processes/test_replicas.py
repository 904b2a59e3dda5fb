"""Schedules that run two replicas of the model, with a process for each rank."""

import pytest

from tests.processes import run_replicas
from tests.processes.ranks import start


def assert_all_pass(ranks):
    codes = ranks.wait()
    assert set(codes) == {0}, "\n".join(ranks.output(rank) for rank in range(len(codes)))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_trains_with_the_bits_of_the_oracle(num_ranks, tmp_path):
    assert_all_pass(start(run_replicas.trains, num_ranks, tmp_path, num_ranks))


def test_a_weight_that_all_stages_use(tmp_path):
    assert_all_pass(start(run_replicas.shares_a_weight_among_all_stages, 4, tmp_path, 4))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_leaves_what_one_replica_leaves(num_ranks, tmp_path):
    assert_all_pass(start(run_replicas.leaves_what_one_replica_leaves, num_ranks, tmp_path, num_ranks))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_failure_in_one_replica_ends_the_step_of_both(num_ranks, tmp_path):
    assert_all_pass(start(run_replicas.fails_in_one_replica, num_ranks, tmp_path, num_ranks))


def test_a_checkpoint_holds_each_weight_once(tmp_path):
    assert_all_pass(start(run_replicas.saves, 2, tmp_path, 2, str(tmp_path / "checkpoint")))


def test_a_rank_reads_its_stages_of_both_replicas(tmp_path):
    assert_all_pass(start(run_replicas.reads_its_weights, 4, tmp_path, 4, str(tmp_path / "model.safetensors")))


def test_a_model_with_three_uses_of_an_embedding(tmp_path):
    pytest.importorskip("transformers")
    assert_all_pass(start(run_replicas.trains_a_library_model, 2, tmp_path, 2))
