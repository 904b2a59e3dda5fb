"""Clipping over processes has the bits of clipping in one."""

import copy
import math

import pytest
import torch
from torch import nn

from pipeloom.processes import clip_grad_norm


def trained(num_layers=4):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(num_layers)))
    model(torch.randn(3, 5)).square().sum().backward()
    model[1].bias.grad = None
    return model


def parts(model, num_ranks):
    named = list(model.named_parameters())
    size = math.ceil(len(named) / num_ranks)
    return [dict(named[start : start + size]) for start in range(0, len(named), size)]


def clipped(own, everyone, names, **options):
    """One rank's call, with what the others say."""
    said = []
    for part in everyone:
        clip_grad_norm(part, names, math.inf, options["norm_type"], False, lambda payload: said.append(payload) or [])
    return clip_grad_norm(own, names, options["max_norm"], options["norm_type"], True, lambda _: said)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_the_norm_and_what_is_left_have_the_bits_of_torch(num_ranks, norm_type):
    model, reference = trained(), trained()
    names = [name for name, _ in model.named_parameters()]
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
    everyone = parts(copy.deepcopy(model), num_ranks)
    for mine, others in zip(parts(model, num_ranks), everyone, strict=True):
        for name, parameter in mine.items():
            grad = trained().get_parameter(name).grad
            parameter.grad = others[name].grad = grad
        found = clipped(mine, restored(everyone), names, max_norm=0.1, norm_type=norm_type)
        assert torch.equal(found, expected)
    for name, parameter in model.named_parameters():
        given = reference.get_parameter(name).grad
        assert (parameter.grad is None) == (given is None)
        assert given is None or torch.equal(parameter.grad, given), name


def restored(everyone):
    """Copies with unclipped gradients: a call changes those that it is given."""
    whole = trained()
    return [{name: whole.get_parameter(name) for name in part} for part in everyone]


def test_the_order_is_that_of_the_model_whatever_rank_has_what():
    """Ranks that hold every other layer say their norms in another order, and a sum in that order has other bits."""
    generator = torch.Generator().manual_seed(1)
    own = {str(i): nn.Parameter(torch.zeros(3, dtype=torch.float64)) for i in range(200)}
    for parameter in own.values():
        parameter.grad = torch.randn(3, generator=generator, dtype=torch.float64) * 10 ** torch.randn(
            1, generator=generator
        )
    everyone = [{n: p for n, p in own.items() if int(n) % 3 == rank} for rank in range(3)]
    said = []
    for part in everyone:
        clip_grad_norm(part, list(own), math.inf, 2.0, False, lambda payload: said.append(payload) or [])
    expected = nn.utils.clip_grad_norm_(own.values(), math.inf)
    assert torch.equal(clip_grad_norm(everyone[0], list(own), math.inf, 2.0, False, lambda _: said), expected)
    other = clip_grad_norm(everyone[0], [], math.inf, 2.0, False, lambda _: said)
    assert not torch.equal(other, expected), "numbers of which the order can be seen"


def test_a_norm_that_is_not_finite_is_refused_if_that_is_asked_for():
    model = trained()
    model[0].weight.grad[0, 0] = math.inf
    own = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 of the gradients is inf, so they can't"):
        clip_grad_norm(own, list(own), 1.0, 2.0, True, lambda payload: [payload])


def test_nothing_to_clip_is_a_norm_of_nothing():
    assert clip_grad_norm({}, [], 1.0, 2.0, True, lambda payload: [payload]).item() == 0.0


def test_a_weight_that_the_model_got_later_counts_too():
    model = trained()
    own = dict(model.named_parameters())
    expected = nn.utils.clip_grad_norm_(trained().parameters(), math.inf)
    found = clip_grad_norm(own, list(own)[:-1], math.inf, 2.0, False, lambda payload: [payload])
    torch.testing.assert_close(found, expected)
