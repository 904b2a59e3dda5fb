"""Contract 2: weights that stages share; each stage accumulates its own share, shares are summed last stage first."""

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import RuntimeStateError, SplitError
from pipeloom.testing import sequential_step
from tests.numerics.asserts import assert_bit_equal, assert_same_gradients, assert_same_state
from tests.numerics.models import CASES, Block, token_loss


def _tied():
    """Embedding and head share their weight, and a block in the middle has the head's bias as its norm's."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(17, 12), Block(0.0), nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 17))
    model[4].weight = model[0].weight
    model[3].weight = model[2].bias
    return model


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("cuts", [[2], [1, 3], [1, 2, 3]], ids=str)
def test_tied_weights_equal_the_oracle(schedule, cuts):
    model = _tied()
    reference = copy.deepcopy(model)
    inputs, target = CASES["transformer"].batch(9)
    options = {"loss_fn": token_loss, "num_microbatches": 4, "cuts": cuts}
    with pl.Pipeline(model, schedule=schedule, **options) as pipe:
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (pipe, reference)]
        for step_index in range(4):
            found = pipe.step(inputs, target=target)
            expected = sequential_step(reference, inputs, target=target, step_index=step_index, **options)
            assert_bit_equal(found, expected, "loss")
            assert_same_gradients(pipe, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(pipe, reference)


def test_tied_weights_equal_a_plain_loop_but_for_the_order_of_a_sum():
    model = _tied().double()
    reference = copy.deepcopy(model)
    inputs, target = CASES["transformer"].batch(8)
    with pl.Pipeline(model, cuts=[1, 3], num_microbatches=4, loss_fn=token_loss) as pipe:
        for _ in range(2):
            pipe.step(inputs, target=target)
            for x, y in zip(inputs.chunk(4), target.chunk(4), strict=True):
                (token_loss(reference(x), y) / 4).backward()
        for name, found in pipe.named_parameters():
            torch.testing.assert_close(found.grad, reference.get_parameter(name).grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("change", [lambda g: g * torch.arange(17)[:, None], lambda g: g.clamp(-1e-3, 1e-3)])
def test_hooks_of_a_tied_weight_change_the_shares_of_the_oracle_too(change, schedule):
    """They were called for the embedding's share alone there, and for those of all stages in the pipeline."""
    model = _tied()
    reference = copy.deepcopy(model)
    for each in (model, reference):
        each[0].weight.register_hook(change)
    inputs, target = CASES["transformer"].batch(8)
    options = {"loss_fn": token_loss, "num_microbatches": 4, "cuts": [1, 3]}
    with pl.Pipeline(model, schedule=schedule, **options) as pipe:
        for step_index in range(2):
            pipe.step(inputs, target=target)
            sequential_step(reference, inputs, target=target, step_index=step_index, **options)
            assert_same_gradients(pipe, reference)


@pytest.mark.in_one_process
def test_a_tied_weight_is_counted_once_and_named_as_ever():
    model = _tied()
    names = [name for name, _ in model.named_parameters()]
    keys = list(model.state_dict())
    with pl.Pipeline(model, cuts=[1, 3], num_microbatches=2, loss_fn=token_loss) as pipe:
        assert [name for name, _ in pipe.named_parameters()] == names
        assert list(pipe.state_dict()) == keys
        pipe.step(*CASES["transformer"].batch(4)[:1], target=CASES["transformer"].batch(4)[1])
        norms = [parameter.grad.norm() for parameter in pipe.parameters()]
        torch.testing.assert_close(pipe.clip_grad_norm_(1e9), torch.stack(norms).norm())


@pytest.mark.in_one_process
def test_copies_stay_equal_whatever_replaces_the_weight():
    model = _tied()
    with pl.Pipeline(model, cuts=[3], num_microbatches=2, loss_fn=token_loss) as pipe:
        first, last = model[0].weight, model[4].weight
        assert first is not last
        first.data = torch.full_like(first, 0.5)
        pipe(CASES["transformer"].batch(4)[0])
        assert torch.equal(first, last)
        assert pipe.unwrap() is model
        assert model[0].weight is model[4].weight


@pytest.mark.in_one_process
def test_a_second_pipeline_ties_anew_and_the_first_one_says_so():
    """A second pipeline on the same model once took the first one's copy for a weight of its own."""
    model = _tied()
    inputs, target = CASES["transformer"].batch(4)
    first = pl.Pipeline(model, cuts=[3], num_microbatches=2, loss_fn=token_loss)
    with pl.Pipeline(model, cuts=[1], num_microbatches=2, loss_fn=token_loss) as second:
        second.step(inputs, target=target)
        assert len(list(second.parameters())) == len(list(_tied().parameters()))
        with pytest.raises(RuntimeStateError, match="another pipeline was made from this model"):
            first.step(inputs, target=target)
    first.close()


def test_a_failed_step_leaves_no_share_behind():
    model = _tied()
    inputs, target = CASES["transformer"].batch(4)
    with pl.Pipeline(model, cuts=[3], num_microbatches=2, loss_fn=lambda o, t: token_loss(o, t) * torch.nan) as pipe:
        with pytest.raises(pl.PipeloomError, match="the loss of micro-batch 0 is nan"):
            pipe.step(inputs, target=target)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.in_one_process
def test_a_frozen_tied_weight_gets_no_gradient():
    model = _tied()
    model[0].weight.requires_grad_(False)
    inputs, target = CASES["transformer"].batch(4)
    with pl.Pipeline(model, cuts=[3], num_microbatches=2, loss_fn=token_loss) as pipe:
        pipe.step(inputs, target=target)
        assert model[0].weight.grad is None
        assert model[2].weight.grad is not None


@pytest.mark.in_one_process
def test_a_hook_that_masks_a_tied_weight_masks_its_gradient():
    model = _tied()
    model[0].weight.register_hook(lambda grad: grad * 0)
    inputs, target = CASES["transformer"].batch(4)
    with pl.Pipeline(model, cuts=[3], num_microbatches=2, loss_fn=token_loss) as pipe:
        pipe.step(inputs, target=target)
        assert not model[0].weight.grad.any()
        assert model[2].weight.grad.any()


@pytest.mark.in_one_process
def test_a_sparse_embedding_tied_to_a_dense_head():
    model = _tied()
    model[0].sparse = True
    reference = copy.deepcopy(model).double()
    inputs, target = CASES["transformer"].batch(8)
    with pl.Pipeline(model.double(), cuts=[3], num_microbatches=2, loss_fn=token_loss) as pipe:
        for _ in range(2):
            pipe.step(inputs, target=target)
            token_loss(reference(inputs), target).backward()
        found, expected = model[0].weight.grad, reference[0].weight.grad
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-12, atol=1e-14)


class FusedLoss(nn.Module):
    """A head and its loss in one, as fused kernels have it; the head is the embedding."""

    def __init__(self, weight: nn.Parameter, returns_count: bool) -> None:
        super().__init__()
        self.weight = weight
        self.returns_count = returns_count

    def forward(self, hidden, target):
        losses = nn.functional.cross_entropy((hidden @ self.weight.T).mT, target, reduction="none")
        return (losses.sum(), losses.numel()) if self.returns_count else losses.mean()


def _fused(returns_count):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(17, 12), Block(0.0), nn.Linear(12, 12))
    return model, FusedLoss(model[0].weight, returns_count)


@pytest.mark.parametrize("returns_count", [False, True])
@pytest.mark.parametrize("cuts", [[], [1], [1, 2]], ids=str)
def test_a_loss_that_holds_a_weight_of_the_model(cuts, returns_count):
    """Two ranks added to one gradient, in any order; where counts came with the losses, most of it got lost."""
    model, loss_fn = _fused(returns_count)
    reference = copy.deepcopy(model)
    reference_loss = FusedLoss(reference[0].weight, returns_count)
    inputs, target = CASES["transformer"].batch(8)
    options = {"num_microbatches": 4, "cuts": cuts}
    with pl.Pipeline(model, loss_fn=loss_fn, **options) as pipe:
        for step_index in range(2):
            found = pipe.step(inputs, target=target)
            step = {"target": target, "loss_fn": reference_loss, "step_index": step_index}
            assert_bit_equal(found, sequential_step(reference, inputs, **step, **options), "loss")
        assert_same_gradients(pipe, reference)
        whole, _ = _fused(False)
        (2 * FusedLoss(whole[0].weight, False)(whole(inputs), target)).backward()
        for name, found in pipe.named_parameters():
            torch.testing.assert_close(found.grad, whole.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@pytest.mark.in_one_process
def test_a_loss_gives_its_weight_back():
    model, loss_fn = _fused(False)
    weight = model[0].weight
    pipe = pl.Pipeline(model, loss_fn=loss_fn, num_stages=2)
    assert loss_fn.weight is not weight
    pipe.unwrap()
    assert loss_fn.weight is model[0].weight is weight


def test_a_loss_that_holds_a_layer_of_an_earlier_stage_is_refused():
    model, loss_fn = _fused(False)
    loss_fn.embedding = model[0]
    with pytest.raises(
        SplitError, match=r"loss function holds a Embedding that is also a layer[^$]*hint: give it the we"
    ):
        pl.Pipeline(model, loss_fn=loss_fn, num_stages=2)
    assert pl.Pipeline(model, loss_fn=loss_fn, num_stages=1).num_stages == 1
