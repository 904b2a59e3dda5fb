"""What a forward's signature says about containers."""

import pytest
import torch
from torch import nn

from pipeloom.splitting.unpacking import Signature


def module(forward):
    made = nn.Module()
    made.forward = forward
    return made


def called(forward, value):
    made = module(forward)
    return Signature.of(made).called(made, value)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda one: [one], [(1, 2)]),
        (lambda one, other: [one, other], [1, 2]),
        (lambda one, other=None: [one, other], [1, 2]),
        (lambda one, other, third=3: [one, other, third], [1, 2, 3]),
        (lambda *values: list(values), [1, 2]),
        (lambda one, *, scale=1: [one], [(1, 2)]),
        (lambda one, **options: [one], [(1, 2)]),
    ],
)
@pytest.mark.parametrize("kind", [tuple, list])
def test_tuples_become_arguments_where_several_are_taken(forward, expected, kind):
    found = called(forward, kind((1, 2)))
    assert [kind(each) if isinstance(each, tuple) else each for each in expected] == found


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda a: [a], [{"a": 1, "b": 2}]),
        (lambda a, b: [a, b], [1, 2]),
        (lambda *, a, b: [a, b], [1, 2]),
        (lambda a, b, c=3: [a, b, c], [1, 2, 3]),
        (lambda a, b, c: [a, b, c], TypeError),
        (lambda **values: [values], [{"a": 1, "b": 2}]),
        (lambda batch, scale=1: [batch], [{"a": 1, "b": 2}]),
        (lambda batch, **rest: [batch], [{"a": 1, "b": 2}]),
        (lambda a, **rest: [a, rest], [1, {"b": 2}]),
    ],
)
def test_dicts_become_arguments_where_their_keys_are_names(forward, expected):
    value = {"a": 1, "b": 2}
    if expected is TypeError:
        with pytest.raises(TypeError, match="missing 2 required positional arguments"):
            called(forward, value)
    else:
        assert called(forward, value) == expected
    assert value == {"a": 1, "b": 2}


def test_keys_that_are_no_names_stay_inside():
    assert called(lambda batch, scale=1: [batch, scale], {0: 1}) == [{0: 1}, 1]
    assert called(lambda **values: [values], {}) == [{}]


@pytest.mark.parametrize("value", [1, None, "text", torch.ones(2)])
def test_other_values_are_one_argument(value):
    assert called(lambda one, other="default": (one, other), value)[0] is value
    assert called(lambda *values: values, value)[0] is value


def test_compiled_modules():
    """torch.compile hides the signature behind (*args, **kwargs)."""

    class Whole(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return pair[0] + pair[1]

    def compiled(module):
        return torch.compile(module, backend="eager")

    assert not Signature.of(compiled(Whole())).has_several
    assert Signature.of(compiled(nn.Bilinear(1, 1, 1))).has_several
    assert not Signature.of(Whole()).has_several


def test_forward_without_a_signature():
    """A scripted module's, say, or a builtin."""
    assert Signature.of(module(min)) == Signature()
    assert called(min, (2, 1)) == 1
