"""What travels between processes, in each of the three ways: read by the rank, by the mesh, over torch.distributed."""

import pytest

from tests.processes import ways
from tests.processes.ranks import start

SIZES = {"small": 16, "medium": 4_000, "large": 40_000}


def assert_all_pass(ranks):
    codes = ranks.wait()
    assert set(codes) == {0}, "\n".join(ranks.output(rank) for rank in range(len(codes)))


@pytest.mark.parametrize("num_columns", SIZES.values(), ids=SIZES)
def test_a_tensor_of_any_size(num_columns, tmp_path):
    layers = [ways.Widened(num_columns), ways.Narrowed(num_columns)]
    assert_all_pass(start(ways.trains_like_the_oracle, 2, tmp_path, layers, [8, 8], 4))


@pytest.mark.parametrize("num_columns", SIZES.values(), ids=SIZES)
def test_a_container_of_everything(num_columns, tmp_path):
    layers = [ways.Many(num_columns), ways.Joined(num_columns)]
    assert_all_pass(start(ways.trains_like_the_oracle, 2, tmp_path, layers, [8, 8], 4))


def test_shapes_that_change_from_step_to_step_and_within_one(tmp_path):
    layers = [ways.Widened(4_000), ways.Narrowed(4_000)]
    assert_all_pass(start(ways.trains_like_the_oracle, 2, tmp_path, layers, [8, 30, 9, 70, 7, 8], 4))


def test_evaluation_and_the_whole_model(tmp_path):
    assert_all_pass(start(ways.evaluates_and_is_whole_again, 3, tmp_path, 3))


def test_what_comes_right_after_an_exchange(tmp_path):
    assert_all_pass(start(ways.goes_on_after_each_exchange, 4, tmp_path, 4))


def test_the_next_step_after_a_failed_one(tmp_path):
    assert_all_pass(start(ways.goes_on_after_a_failed_step, 3, tmp_path, 3))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_another_batch_on_one_rank_is_found(rank, tmp_path):
    ranks = start(ways.is_given_another_batch, 3, tmp_path, rank, 3)
    assert ranks.wait() == [1, 1, 1]
    for each in range(3):
        assert "was given another batch in call 1 than this rank" in ranks.output(each)


def test_another_number_of_processes_than_ranks(tmp_path):
    ranks = start(ways.asks_for_other_ranks, 2, tmp_path, 3)
    assert ranks.wait() == [1, 1]
    assert "there are 2 processes, but the schedule puts 3 stages on 3 ranks" in ranks.output(0)
    assert "run all ranks as threads of each process with transport='local'" in ranks.output(1)


def test_models_that_differ_are_told(tmp_path):
    ranks = start(ways.makes_its_own_model, 2, tmp_path, [1, 2], [[2], [2]])
    assert_all_pass(ranks)
    assert "PipeloomWarning: the processes made models with different weights" in ranks.output(0)
    assert "different weights" not in ranks.output(1)


def test_models_that_are_cut_differently_are_refused(tmp_path):
    ranks = start(ways.makes_its_own_model, 2, tmp_path, [1, 1], [[2], [3]])
    assert ranks.wait() == [1, 1]
    for rank in range(2):
        assert (
            "where the model is cut is [['0', '1'], ['2', '3']] on rank 0, but [['0', '1', '2'], ['3']] on rank 1"
            in (ranks.output(rank))
        )


def test_a_loss_over_a_weight_of_another_process_is_refused(tmp_path):
    ranks = start(ways.loss_uses_a_weight_elsewhere, 2, tmp_path)
    assert ranks.wait() == [1, 1]
    assert "the loss function uses '0.weight', a weight of an earlier stage" in ranks.output(1)


@pytest.mark.parametrize(
    "function",
    [
        ways.broadcasts_containers,
        ways.takes_conjugated_inputs,
        ways.steps_in_a_child,
        ways.makes_many_and_closes_none,
        ways.ties_a_sparse_embedding,
        ways.ends_right_after_a_step_with_a_large_tie,
        ways.evaluates_more_than_the_sockets_hold,
        ways.is_used_after_it_was_closed,
        ways.evaluation_keeps_nothing,
    ],
)
def test_what_once_went_wrong(function, tmp_path):
    assert_all_pass(start(function, 2, tmp_path))


def test_a_type_that_no_other_process_knows_is_refused(tmp_path):
    ranks = start(ways.hands_on_a_type_of_a_function, 2, tmp_path)
    assert ranks.wait() == [1, 1]
    for rank in range(2):
        assert "what a stage handed on can't be named to another process" in ranks.output(rank)
        assert "at the top level of a module, not inside a function" in ranks.output(rank)


@pytest.mark.parametrize("function", [ways.reads_slices_of_other_data, ways.has_other_numbers_in_the_middle])
def test_other_data_is_found_wherever_it_is(function, tmp_path):
    """A loss was computed from one rank's inputs and another one's targets."""
    ranks = start(function, 2, tmp_path)
    assert ranks.wait() == [1, 1]
    for rank in range(2):
        assert "was given another batch in call 1 than this rank" in ranks.output(rank)


@pytest.mark.parametrize("call", ["clip", "broadcast", "gather"])
def test_calls_that_others_do_not_make_are_found(call, tmp_path):
    """The ranks waited for each other for ten minutes, the limit, and then blamed each other."""
    ranks = start(ways.makes_other_calls, 3, tmp_path, call)
    assert ranks.wait() == [1, 1, 1]
    lines = [ranks.last_lines(rank)[-1].removeprefix(f"[rank{rank}]: ") for rank in range(3)]
    assert len(set(lines)) == 1
    said = "all ranks wait for each other, and none does anything: they do not make the same calls"
    assert said in lines[0] or "the ranks are at different places" in ranks.output(0)


@pytest.mark.parametrize("num_columns", [SIZES["small"], SIZES["large"]])
def test_a_torn_transfer_is_never_taken_for_another(num_columns, tmp_path):
    ranks = start(ways.goes_on_after_a_torn_transfer, 2, tmp_path, num_columns)
    assert ranks.wait() == [1, 1]
    for rank in range(2):
        assert "an earlier transfer was interrupted in the middle" in ranks.output(rank)


def test_a_death_while_the_pipeline_is_made(tmp_path):
    """The other rank waited for torch's group, half an hour, and said nothing."""
    ranks = start(ways.dies_while_others_make_the_pipeline, 2, tmp_path)
    assert ranks.wait() == [1, 9]
    assert "is gone: its process ended without a word" in ranks.last_lines(0)[-1]


def test_the_same_last_line_from_within_a_context(tmp_path):
    ranks = start(ways.fails_within_a_context, 2, tmp_path)
    assert ranks.wait() == [1, 1]
    lines = [ranks.last_lines(rank)[-1].removeprefix(f"[rank{rank}]: ") for rank in range(2)]
    assert lines[0] == lines[1]
    assert lines[0].endswith("ValueError: the user's own mistake")
