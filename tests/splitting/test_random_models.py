"""Models that nobody wrote: cut anywhere, they train as one process trains them."""

import copy
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

import pipeloom as pl
from pipeloom import Pipeline
from pipeloom.batch.microbatches import merge_outputs, split_batch
from pipeloom.errors import BatchError, SplitError
from pipeloom.testing import sequential_step
from tests.random_models import OPERATIONS, RandomModel, random_inputs, score, tensors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
some = settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a seed does not shrink
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
shapes = st.tuples(
    st.integers(2, 5), st.integers(1, 3), st.sampled_from(["gpipe", "1f1b"]), st.booleans(), st.integers(0, 1)
)


def made(random, shape, operations=tuple(OPERATIONS)):
    torch.manual_seed(random.randrange(1 << 30))
    model = RandomModel(random, operations)
    num_stages, num_microbatches, schedule, recompute, odd = shape
    inputs = random_inputs(random, 2 * num_microbatches + odd)
    loss_fn = None if model.form == "loss" else score
    options = {"num_stages": num_stages, "num_microbatches": num_microbatches, "loss_fn": loss_fn}
    return model, inputs, options, {"schedule": schedule, "recompute": recompute}


def plain_step(model, inputs, num_microbatches, loss_fn):
    """A loop that knows no pipeline; a program that plain torch cannot train is no example."""
    parts = split_batch((), inputs, None, num_microbatches)
    total = 0.0
    try:
        for part in parts:
            output = model(**part.kwargs)
            loss = output["loss"] if loss_fn is None else loss_fn(output)
            share = part.num_samples / sum(each.num_samples for each in parts)
            loss.backward(torch.full_like(loss, share))
            total = total + loss.detach() * share
    except RuntimeError:
        assume(False)
    assume(bool(torch.isfinite(total)))
    return total


def assume_enough_parts(model, inputs, options):
    """Few parts can be separated where memory that is shared is written."""
    try:
        pl.split(copy.deepcopy(model), (), inputs, num_stages=options["num_stages"])
    except SplitError as error:
        assume("parts that a cut can separate" not in str(error))


def assert_same(ours, theirs, tolerance=0.0):
    """Gradients and buffers, to the bit where no tolerance is given."""
    for what in (lambda m: [(n, p.grad) for n, p in m.named_parameters()], lambda m: list(m.named_buffers())):
        for (name, one), (_, other) in zip(what(ours), what(theirs), strict=True):
            assert (one is None) == (other is None), name
            if one is not None:
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=name)


@some
@given(seed=st.integers(0, 1 << 20), shape=shapes)
def test_a_step_is_the_oracles_to_the_bit(seed, shape):
    model, inputs, options, way = made(Random(seed), shape)
    oracle, plain = copy.deepcopy(model), copy.deepcopy(model)
    loss = plain_step(plain, inputs, options["num_microbatches"], options["loss_fn"])
    assume_enough_parts(model, inputs, options)
    with Pipeline(model, **options, **way) as pipe:
        ours = pipe.step(**inputs)
        pipe.unwrap()
    assert torch.equal(ours, sequential_step(oracle, **options, **inputs))
    assert_same(model, oracle)
    if not model.draws:
        torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-6)
        assert_same(model, plain, 1e-5)


@some
@given(seed=st.integers(0, 1 << 20), shape=shapes, schedule=st.sampled_from(["1f1b", "zb-h1"]))
@example(seed=25, shape=(3, 3, "1f1b", False, 1), schedule="zb-h1")
def test_every_module_may_run_again_by_itself(seed, shape, schedule):
    """Also in a checkpoint of the model's own, whose second forward W may ask for."""
    model, inputs, options, _ = made(Random(seed), shape)
    oracle = copy.deepcopy(model)
    plain_step(copy.deepcopy(model), inputs, options["num_microbatches"], options["loss_fn"])
    assume_enough_parts(model, inputs, options)
    try:
        with Pipeline(model, **options, schedule=schedule, recompute="*") as pipe:
            ours = pipe.step(**inputs)
            pipe.unwrap()
    except SplitError as error:  # nothing but single layers
        assume("names single layers" not in str(error))
        raise
    except (BatchError, RuntimeError) as error:  # refused, by us or by torch
        assume("in place" not in str(error) and "inplace" not in str(error))
        raise
    assert torch.equal(ours, sequential_step(oracle, **options, **inputs))
    assert_same(model, oracle)


@some
@given(seed=st.integers(0, 1 << 20), shape=shapes)
def test_steps_of_an_optimizer_keep_every_copy_of_a_weight_equal(seed, shape):
    model, inputs, options, way = made(Random(seed), shape)
    oracle = copy.deepcopy(model)
    plain_step(copy.deepcopy(model), inputs, options["num_microbatches"], options["loss_fn"])
    assume_enough_parts(model, inputs, options)
    with Pipeline(model, **options, **way) as pipe:
        ours, theirs = (torch.optim.AdamW(each.parameters(), 1e-2) for each in (pipe, oracle))
        for step_index in range(2):
            pipe.step(**inputs)
            sequential_step(oracle, **options, **inputs, step_index=step_index)
            norm = nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
            assert torch.equal(pipe.clip_grad_norm_(1.0), norm)
            ours.step(), theirs.step(), pipe.zero_grad(), oracle.zero_grad()
        state = pipe.state_dict()
    assert list(state) == list(oracle.state_dict())
    assert all(torch.equal(each, state[name]) for name, each in oracle.state_dict().items())


@some
@given(seed=st.integers(0, 1 << 20), shape=shapes)
def test_evaluation_after_training_gives_what_the_whole_model_gives(seed, shape):
    # Whoever counts calls gives another answer the next time.
    model, inputs, options, way = made(Random(seed), shape, tuple(each for each in OPERATIONS if each != "count"))
    plain_step(copy.deepcopy(model), inputs, options["num_microbatches"], options["loss_fn"])
    assume_enough_parts(model, inputs, options)
    with Pipeline(model, **options, **way) as pipe:
        pipe.step(**inputs)
        pipe.eval()
        ours = pipe(**inputs)
        whole = pipe.unwrap()
    parts = split_batch((), inputs, None, options["num_microbatches"])
    with torch.no_grad():
        theirs = merge_outputs([whole(**part.kwargs) for part in parts], [part.num_samples for part in parts])
    for one, other in zip(tensors(ours), tensors(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
