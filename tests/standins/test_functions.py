"""Custom autograd functions in a parent's code."""

import pytest
import torch

from pipeloom.standins.functions import Met, look, make_seen
from pipeloom.standins.glue import Seen, unseen


def doubling():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    return Double


def test_a_class_is_met_in_its_forward_and_seen_as_one_call_from_then_on():
    kind, names = doubling(), []

    def glue(func, args, kwargs):
        look()
        names.append(func.__self__.__name__)
        return func(*args, **kwargs)

    x = torch.ones(1, requires_grad=True)
    with Seen(glue):
        with pytest.raises(Met):
            kind.apply(x)
        out = kind.apply(x)
    out.backward()
    assert names == ["Double"]
    assert x.grad == 2


def test_nothing_changes_where_nobody_sees():
    kind = doubling()
    make_seen(kind)
    mode = Seen(lambda func, args, kwargs: pytest.fail("it was seen"))
    with mode, unseen(mode):
        assert kind.apply(torch.ones(1)) == 2


def test_a_class_with_an_apply_of_its_own_keeps_it_and_passes_it_on():
    class Tripled(doubling()):
        @classmethod
        def apply(cls, x):
            return super().apply(x) * 1.5

    class Child(Tripled):
        pass

    make_seen(Tripled)
    assert Tripled.apply(torch.ones(1)) == Child.apply(torch.ones(1)) == 3
