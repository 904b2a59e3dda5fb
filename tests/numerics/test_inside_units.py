"""What users have inside their layers: torch's own checkpointing, compiled layers, draws of every kind, statistics."""

import copy
import shutil
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from tests.numerics.asserts import assert_bit_equal, assert_pipeline_equals_oracle
from tests.numerics.models import CASES, Block, Case, stages, token_loss


class Checkpointed(nn.Module):
    """A block whose activations torch recomputes in the backward."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.block = Block(0.3)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


class Noisy(nn.Module):
    """Draws in its forward in four ways."""

    def forward(self, x):
        scale = torch.rand(x.shape[0], 1, 1)
        noise = torch.randn_like(x) + torch.empty_like(x).normal_()
        keep = torch.bernoulli(torch.full_like(x, 0.7))
        return x * keep + scale * noise


def _case(*middle):
    def build():
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return nn.Sequential(nn.Embedding(17, 12), *(make() for make in middle), nn.Linear(12, 17))

    return Case(build, CASES["transformer"].batch, token_loss)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved-tensors", "reentrant"])
def test_checkpoint_inside_a_unit_draws_the_same_mask_again(use_reentrant, recompute):
    """A rank thread once recomputed with another mask, silently: the default generator had moved on."""

    def checkpointed():
        return Checkpointed(use_reentrant=use_reentrant)

    assert_pipeline_equals_oracle(
        _case(checkpointed, checkpointed),
        num_rows=8,
        num_microbatches=4,
        num_stages=stages(3),
        recompute=recompute,
        num_steps=2,
    )


@pytest.mark.in_one_process
def test_a_checkpoint_changes_no_bit():
    inputs, target = CASES["transformer"].batch(8)
    plain = _case(lambda: Block(0.3)).build()
    checkpointed = _case(lambda: Checkpointed(use_reentrant=False)).build()
    pipes = [
        pl.Pipeline(each, num_stages=stages(3), num_microbatches=4, loss_fn=token_loss)
        for each in (plain, checkpointed)
    ]
    losses = [pipe.step(inputs, target=target) for pipe in pipes]
    assert_bit_equal(losses[1], losses[0], "loss")
    for found, expected in zip(pipes[1].parameters(), plain.parameters(), strict=True):
        assert_bit_equal(found.grad, expected.grad, "gradient")


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_draws_of_every_kind(num_stages):
    case = _case(Noisy, lambda: nn.RReLU(), lambda: nn.FeatureAlphaDropout(0.3), lambda: Block(0.1))
    assert_pipeline_equals_oracle(case, num_rows=6, num_microbatches=3, num_stages=num_stages, num_steps=2)


def test_draws_leave_the_default_generator_alone():
    case = _case(Noisy, nn.Identity)
    inputs, target = case.batch(6)
    state = torch.get_rng_state()
    with pl.Pipeline(case.build(), num_stages=stages(2), num_microbatches=3, loss_fn=case.loss_fn) as pipe:
        pipe.step(inputs, target=target)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_thread_that_draws_disturbs_nothing():
    """Rank threads share the process's generator with everybody; whoever draws from it must not matter."""
    case = _case(Noisy, Noisy)
    inputs, target = case.batch(6)
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            torch.rand(100)

    losses = []
    for is_disturbed in (False, True):
        thread, model = threading.Thread(target=draw), case.build()  # its weights come from that generator
        if is_disturbed:
            thread.start()
        with pl.Pipeline(model, num_stages=stages(2), num_microbatches=3, loss_fn=case.loss_fn) as pipe:
            losses.append(pipe.step(inputs, target=target))
    stop.set()
    thread.join()
    assert_bit_equal(losses[1], losses[0], "loss")


@pytest.mark.in_one_process
def test_steps_and_micro_batches_draw_differently():
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    with pl.Pipeline(model, num_stages=stages(2), num_microbatches=2, loss_fn=lambda o: o.sum()) as pipe:
        ones = torch.ones(2, 64, requires_grad=True)
        outputs = [pipe.step(ones, return_outputs=True)[1] for _ in range(2)]
    assert not torch.equal(outputs[0][0], outputs[0][1])
    assert not torch.equal(outputs[0], outputs[1])


# torch's compiler trips over its own warnings where they are errors.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_units_equal_the_same_compiled_units():
    """Contract 7: against the same compiled layers and shapes, never against eager."""
    case = CASES["mlp"]
    model = case.build()
    model[2] = torch.compile(model[2], dynamic=False)
    inputs, target = case.batch(8)
    expected = []
    for x, y in zip(inputs.chunk(2), target.chunk(2), strict=True):
        loss = case.loss_fn(model(x), y) / 2
        loss.backward()
        expected.append(loss.detach())
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with pl.Pipeline(model, num_stages=stages(2), num_microbatches=2, loss_fn=case.loss_fn) as pipe:
        found = pipe.step(inputs, target=target)
        assert_bit_equal(found, expected[0] + expected[1], "loss")
        for name, parameter in pipe.named_parameters():
            assert_bit_equal(parameter.grad, gradients[name], name)


@pytest.mark.in_one_process
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_deferred_statistics_are_those_of_the_whole_batch(recompute):
    """Contract 6: only the running statistics; gradients are still those of micro-batches."""
    case = CASES["convolution"]
    inputs, target = case.batch(12)
    whole, model = case.build(), case.build()
    options = {"num_stages": stages(3), "num_microbatches": 4, "loss_fn": case.loss_fn, "recompute": recompute}
    with pl.Pipeline(model, batch_norm="deferred", **options) as pipe:
        pipe.step(inputs, target=target)
    whole(inputs)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(model[1], name), getattr(whole[1], name))
    plain = copy.deepcopy(case.build())
    with pl.Pipeline(plain, **options) as pipe:
        pipe.step(inputs, target=target)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_bit_equal(found.grad, expected.grad, "gradient")
