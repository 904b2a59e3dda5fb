"""Weights of several stages: a leaf for each stage on one memory, shares summed last stage first."""

import pytest
import torch
from torch import nn

from pipeloom.errors import RuntimeStateError
from pipeloom.splitting import Ties, split


def tied(num_stages):
    """Linear layers with one weight, each a stage."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(num_stages)))
    for layer in model[1:]:
        layer.weight = model[0].weight
    return model


def ties_of(model, **options):
    return Ties(split(model, **(options or {"num_stages": len(model)})))


def test_later_stages_have_leaves_on_the_same_memory():
    model = tied(3)
    weight = model[0].weight
    ties = ties_of(model)
    weights = [layer.weight for layer in model]
    assert [ties.is_copy(each) for each in weights] == [False, True, True]
    assert len({id(each) for each in weights}) == 3
    assert {each.data_ptr() for each in weights} == {weight.data_ptr()}


def test_layers_of_one_stage_share_its_leaf():
    model = tied(4)
    ties_of(model, cuts=[2])
    assert model[0].weight is model[1].weight
    assert model[2].weight is model[3].weight is not model[0].weight


def test_shares_are_summed_last_stage_first():
    """1e8 + 1 is 1e8 in float32, so the order shows."""
    model = tied(4)
    ties = ties_of(model)
    for layer, share in zip(model, (0.5, 1.0, -1e8, 1e8), strict=True):
        layer.weight.grad = torch.full((2, 2), share)
    ties.gather(range(9))
    assert torch.equal(model[0].weight.grad, torch.full((2, 2), 1.5))
    assert [layer.weight.grad for layer in model[1:]] == [None] * 3


def test_shares_join_no_gradient_or_an_earlier_one():
    model = tied(2)
    ties = ties_of(model)
    for expected in (1.0, 2.0):
        model[1].weight.grad = torch.ones(2, 2)
        ties.gather(range(9))
        assert torch.equal(model[0].weight.grad, torch.full((2, 2), expected))


def test_copies_follow_their_owner():
    model = tied(2)
    ties = ties_of(model)
    model[0].weight.data = torch.full((2, 2), 7.0)
    model[0].weight.requires_grad_(False)
    ties.refresh(range(9))
    assert torch.equal(model[1].weight, model[0].weight)
    assert not model[1].weight.requires_grad


def test_weight_that_was_replaced_is_noticed():
    model = tied(2)
    ties = ties_of(model)
    model[1].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RuntimeStateError, match=r"stages share was replaced.*\nhint: make each pipeline from a model"):
        ties.refresh(range(9))


def test_undo_gives_every_stage_the_one_weight():
    model = tied(3)
    weight = model[0].weight
    ties_of(model).undo()
    assert all(layer.weight is weight for layer in model)


def test_copies_of_an_earlier_cut_are_taken_for_their_owner():
    model = tied(3)
    weight = model[0].weight
    ties_of(model)
    again = ties_of(model)
    again.undo()
    assert all(layer.weight is weight for layer in model)


@pytest.mark.parametrize(
    "change", [torch.nn.utils.parametrizations.weight_norm, lambda layer: layer.__delattr__("weight")]
)
def test_weight_that_left_its_place_is_noticed(change):
    """The step ended in a KeyError: 'weight'."""
    model = tied(2)
    ties = ties_of(model)
    change(model[1])
    with pytest.raises(RuntimeStateError, match="parametrized or pruned after it was cut"):
        ties.refresh(range(9))
    ties.undo()


@pytest.mark.parametrize("has_earlier", [False, True])
@pytest.mark.parametrize("sparse_stage", [0, 1, 2])
def test_sparse_shares_join_dense_ones(sparse_stage, has_earlier):
    """An embedding with sparse gradients as the head's weight: the step ended with torch's "add(sparse, dense)"."""
    model = tied(3)
    ties = ties_of(model)
    for stage, layer in enumerate(model):
        share = torch.eye(2)
        layer.weight.grad = share.to_sparse() if stage == sparse_stage else share
    model[0].weight.grad = model[0].weight.grad if has_earlier else None
    ties.gather(range(9))
    assert torch.equal(model[0].weight.grad.to_dense(), torch.eye(2) * (3 if has_earlier else 2))


def test_hooks_of_the_weight_see_every_share():
    """A hook that masks rows, as people freeze a padding token with, did not reach the head's share."""
    model, seen = tied(3), []
    ties = ties_of(model)
    handles = [model[0].weight.register_hook(lambda grad: grad * 2), model[0].weight.register_hook(seen.append)]
    for _ in range(2):
        ties.refresh(range(9))
    model[2].weight.sum().backward()
    assert torch.equal(model[2].weight.grad, torch.full((2, 2), 2.0))
    assert [each[0, 0].item() for each in seen] == [2.0]
    for handle in handles:
        handle.remove()
    model[1].weight.sum().backward()
    assert torch.equal(model[1].weight.grad, torch.ones(2, 2))
