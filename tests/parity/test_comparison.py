"""When two tensors are equal, right, or wrong."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.parity.comparison import Comparison, Difference, Pair, compared


def difference(found, expected, *, coarsest=torch.float32, beside=()):
    """One pair, held against each other beside others."""
    pairs = [Pair("one", found, expected, False, coarsest)]
    pairs += [Pair(f"other {i}", each, each, False, coarsest) for i, each in enumerate(beside)]
    return compared(pairs)[0]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, math.nan, math.inf]),
        torch.eye(3).to_sparse(),
        torch.tensor([1 + 2j]),
        torch.zeros(0),
        torch.zeros(2, dtype=torch.bfloat16),
        None,
    ],
)
def test_what_is_the_same_is_equal_to_the_bit(value):
    found = difference(value, value if value is None else value.clone())
    assert found.is_bit_equal
    assert str(found) == "one: equal to the bit"


@pytest.mark.parametrize(
    ("dtype", "share", "is_right"),
    [
        (torch.float32, 5e-7, True),
        (torch.float32, 1e-5, False),
        (torch.float64, 5e-13, True),
        (torch.float64, 1e-10, False),
        (torch.bfloat16, 2e-2, True),
        (torch.bfloat16, 0.25, False),
    ],
)
def test_the_bound_is_that_of_the_type(dtype, share, is_right):
    expected = torch.tensor([1.0, 0.5], dtype=torch.float64)
    found = difference((expected * (1 + share)).to(dtype), expected.to(dtype), coarsest=dtype)
    assert not found.is_bit_equal
    assert found.is_right == is_right


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 0.9))
def test_the_bound_knows_no_unit(size, share):
    expected = torch.tensor([1.0, -0.25, 0.5]) * size
    assert not difference(expected * (1 + share), expected).is_right
    assert difference(expected * (1 + share), expected).relative == pytest.approx(share, rel=1e-3)


def test_rounding_beside_large_gradients_is_no_mistake():
    """A bias before a BatchNorm has the gradient zero, and what rounding makes of it."""
    noise, other_noise = torch.tensor([1e-9, -2e-9]), torch.tensor([-3e-9, 1e-9])
    assert difference(noise, other_noise, beside=[torch.ones(3)]).is_right
    assert not difference(noise, other_noise).is_right


@pytest.mark.parametrize(
    ("found", "expected", "what"),
    [
        (None, torch.ones(1), "no gradient, and there should be one"),
        (torch.ones(1), None, "a gradient, and there should be none"),
        (torch.ones(2), torch.ones(1), r"torch.float32 \(2,\), and should be torch.float32 \(1,\)"),
        (torch.ones(1).double(), torch.ones(1), r"torch.float64 \(1,\), and should be torch.float32 \(1,\)"),
        (torch.tensor([math.nan]), torch.ones(1), "not finite where it should be"),
        (torch.tensor([1.0]), torch.tensor([math.inf]), "not finite where it should be"),
    ],
)
def test_what_cannot_be_measured_is_wrong(found, expected, what):
    result = difference(found, expected)
    assert not result.is_right
    assert re.search(what, str(result))


def test_the_worst_come_first_and_the_rest_is_counted():
    right = Difference("right", False, largest=1e-8, scale=1.0, allowed=1e-6)
    wrong = [Difference(f"w{i}", False, largest=float(i), scale=1.0) for i in range(1, 8)]
    loss = Difference("loss", False, largest=0.1, scale=1.0)
    comparison = Comparison(1.0, 2.0, (right, *wrong, loss, Difference("same", True)))
    assert [each.name for each in comparison.wrong[:3]] == ["loss", "w7", "w6"]
    assert [each.name for each in comparison.inexact] == ["right"]
    assert str(comparison).startswith(
        "1 of 10 equal to the bit (the loss, and gradients); loss: off by 1.0e-01, relative"
    )
    assert str(comparison).endswith("; and 4 more")


def test_nothing_to_say_of_equal_ones():
    comparison = Comparison(1.0, 1.0, compared([Pair("loss", torch.ones(()), torch.ones(()), False, torch.float32)]))
    assert comparison.is_bit_equal
    assert str(comparison) == "1 of 1 equal to the bit (the loss, and gradients)"
