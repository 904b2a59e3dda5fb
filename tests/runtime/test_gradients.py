"""A step is a transaction on gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeloom.errors import RuntimeStateError
from pipeloom.runtime.gradients import GradientScope, set_grad_dtype


def parameter(gradient=None, size=3):
    made = nn.Parameter(torch.zeros(size))
    made.grad = None if gradient is None else torch.full((size,), float(gradient))
    return made


def add(each, value):
    """As autograd does."""
    new = torch.full_like(each, float(value))
    if each.grad is None:
        each.grad = new
    else:
        each.grad += new


@pytest.mark.parametrize("earlier", [None, 5.0])
def test_gradients_add_up_where_nothing_is_scaled(earlier):
    each = parameter(earlier)
    scope = GradientScope([each])
    add(each, 2)
    scope.finish(1.0)
    assert each.grad.tolist() == [2.0 + (earlier or 0)] * 3


@pytest.mark.parametrize("earlier", [None, 5.0])
def test_only_this_steps_share_is_scaled(earlier):
    each = parameter(earlier)
    scope = GradientScope([each])
    scope.set_apart()
    add(each, 2)
    scope.set_apart()
    add(each, 4)
    scope.finish(0.5)
    assert each.grad.tolist() == [3.0 + (earlier or 0)] * 3


def test_unused_parameters_keep_what_they_had():
    used, unused, untouched = parameter(1), parameter(7), parameter()
    scope = GradientScope([used, unused, untouched])
    scope.set_apart()
    add(used, 1)
    scope.finish(2.0)
    assert used.grad.tolist() == [3.0] * 3
    assert unused.grad.tolist() == [7.0] * 3
    assert untouched.grad is None


def test_scaled_gradients_stay_the_callers_tensor():
    each = parameter(1)
    before = each.grad
    scope = GradientScope([each])
    scope.set_apart()
    add(each, 1)
    scope.finish(1.0)
    assert each.grad is before
    assert before.tolist() == [2.0] * 3


@given(
    earlier=st.none() | st.floats(-1e3, 1e3, width=32),
    added=st.lists(st.floats(-1e3, 1e3, width=32), max_size=4),
    is_apart=st.booleans(),
    is_finished=st.booleans(),
)
def test_restore_is_exact(earlier, added, is_apart, is_finished):
    each = parameter(earlier)
    before = each.grad
    scope = GradientScope([each])
    if is_apart:
        scope.set_apart()
    for value in added:
        add(each, value)
    if is_finished:
        scope.finish(3.0)
    scope.restore()
    assert each.grad is before
    assert before is None or before.tolist() == [earlier] * 3


@pytest.mark.parametrize("earlier", [None, 5.0])
def test_late_additions_are_dropped(earlier):
    each = parameter(earlier)
    scope = GradientScope([each])
    scope.restore()
    add(each, 1)
    scope.drop_late()
    assert (each.grad is None) if earlier is None else each.grad.tolist() == [5.0] * 3


@pytest.mark.parametrize("is_late", [False, True])
def test_gradient_that_the_caller_dropped_stays_dropped(is_late):
    each = parameter(5)
    scope = GradientScope([each])
    scope.restore()
    each.grad = None
    if is_late:
        add(each, 1)
    scope.drop_late()
    assert each.grad is None


def test_no_parameters():
    scope = GradientScope([])
    scope.set_apart()
    scope.finish(1.0)
    assert scope.restore() is None


def test_a_parameter_that_is_there_twice_is_scaled_once():
    """A weight that the last stage and the loss share was scaled twice."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    scope = GradientScope([weight, weight])
    scope.set_apart()
    weight.grad = torch.full((2,), 4.0)
    scope.finish(0.5)
    assert weight.grad.tolist() == [3, 3]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch accumulates in the parameter's dtype")
def test_grad_dtypes_that_cannot_be():
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeStateError, match=r"grad_dtype=torch.int64 was given; a floating dtype is needed"):
        set_grad_dtype([parameter], torch.int64)
    parameter.grad = torch.ones(2)
    with pytest.raises(RuntimeStateError, match=r"has a gradient in torch.float32 already\nhint: call zero_grad"):
        set_grad_dtype([parameter], torch.float64)


def test_grad_dtype_leaves_alone_what_has_no_gradient_or_has_it_so_already():
    counter = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    set_grad_dtype([counter, weight], torch.float32)
    assert (counter.dtype, weight.grad.dtype) == (torch.int64, torch.float32)


def test_grad_dtype_needs_a_torch_that_has_it():
    """On torch 2.9 a parameter has no such switch."""
    stand_in = type("Parameter29", (), {"dtype": torch.bfloat16, "grad": None, "is_floating_point": lambda self: True})
    with pytest.raises(RuntimeStateError, match=r"accumulates in the parameter's dtype only\nhint: use a torch whose"):
        set_grad_dtype([stand_in()], torch.float32)
