"""Models that are cut by running them, with a process for each rank."""

from functools import partial

import pytest
from torch import nn

from tests.processes import run_models
from tests.processes.ranks import start
from tests.runtime.test_every_schedule import NAMES


def assert_all_pass(ranks):
    codes = ranks.wait()
    assert set(codes) == {0}, "\n".join(ranks.output(rank) for rank in range(len(codes)))


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {}),
        (4, {}),
        (3, {"schedule": "gpipe", "recompute": True}),
        (2, {"cuts": ["blocks.2.norm"]}),
        (2, run_models.IN_PAIRS),
        (2, {"schedule": "zb-h1", "recompute": ["blocks.*"]}),
    ],
    ids=["two", "four", "gpipe with recompute", "a cut inside a block", "pairs at once", "named recompute"],
)
def test_trains_with_the_bits_of_the_oracle(num_ranks, options, tmp_path):
    assert_all_pass(start(run_models.trains, num_ranks, tmp_path, num_ranks, options))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_weights_are_read_where_they_live(num_ranks, tmp_path):
    ranks = start(run_models.reads_its_weights, num_ranks, tmp_path, num_ranks, str(tmp_path / "model.safetensors"))
    assert_all_pass(ranks)


@pytest.mark.parametrize("share", range(3))
def test_every_schedule_between_processes(share, tmp_path):
    assert_all_pass(start(run_models.runs_schedules, 4, tmp_path, 4, NAMES[share::3]))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_code_that_looks_at_numbers_has_the_weights_it_goes_on_with(num_ranks, tmp_path):
    """The last rank stopped at a weight that the first owns: "Placeholder(float32(8,)) … did not come to stage 1"."""
    assert_all_pass(start(run_models.looks_late, num_ranks, tmp_path, num_ranks))


@pytest.mark.parametrize("kind", [nn.GELU, run_models.Activation])
def test_blocks_that_share_a_layer_come_back_as_they_were_trained(kind, tmp_path):
    """One activation object for all blocks: after `unwrap` rank 0 had the others' weights of before the training, and
    a buffer in the object was an error, "aten.clone.default needs the numbers of a value of another stage"."""
    assert_all_pass(start(run_models.shares_a_layer, 2, tmp_path, 2, kind))


def test_weights_that_layers_are_given_between_steps(tmp_path):
    """The first rank took them all for its own, and the others' adapters were never trained."""
    assert_all_pass(start(run_models.gets_weights_later, 2, tmp_path, 2))


def test_parameters_before_the_first_step_need_an_example(tmp_path):
    ranks = start(run_models.has_no_inputs_yet, 2, tmp_path, 2)
    assert ranks.wait() == [1, 1]
    assert "pass example_args= or example_kwargs= to the pipeline, or call step() first" in ranks.output(0)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_goes_on_with_the_same_bits(in_background, tmp_path):
    """`Saver(store)`, as the page on checkpoints has it, took each rank for all of them: one of them kept its stages,
    and `pipeloom checkpoint verify` said good."""
    resumes = partial(run_models.resumes, in_background=in_background)
    assert_all_pass(start(resumes, 2, tmp_path, 2, str(tmp_path / "checkpoints")))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_model_with_three_uses_of_an_embedding(num_ranks, tmp_path):
    pytest.importorskip("transformers")
    assert_all_pass(start(run_models.trains_a_library_model, num_ranks, tmp_path, run_models.t5, num_ranks))
