"""Torch functions seen as they are called."""

import pytest
import torch

from pipeloom.standins.glue import Seen, current, exchanged, read, tensors_in, unseen
from pipeloom.standins.placeholder import NoNumbers, Placeholder, computing


def watching():
    names = []

    def glue(func, args, kwargs):
        names.append(func.__name__)
        return func(*args, **kwargs)

    return Seen(glue), names


def test_functions_are_seen_and_questions_about_shapes_are_not():
    mode, names = watching()
    with mode:
        x = torch.ones(2, 3)
        assert x.shape == (2, 3)
        assert x.dim() == 2
        assert x.dtype == torch.float32
        (x + 1).sum()
    assert names == ["ones", "add", "sum"]


def test_a_question_about_a_shape_may_name_its_tensor():
    """``torch.numel(input=x)`` in the code of a stage was an IndexError: the tensor was taken from ``args[0]``."""
    made = Placeholder(torch.empty(2, 3, device="meta"), torch.device("cpu"))
    with Seen(watching()[0].see, is_stage=True):
        assert torch.numel(input=made) == 6
        assert torch.is_same_size(input=made, other=torch.ones(2, 3))
        assert torch.is_floating_point(input=made)
        made.is_uncertain = True
        with pytest.raises(NoNumbers, match="depends on numbers"):
            torch.numel(input=made)
        with pytest.raises(NoNumbers, match="depends on numbers"):
            torch.is_same_size(torch.ones(2, 3), other=made)


def test_an_iteration_is_seen_as_its_parts():
    mode, names = watching()
    with mode:
        first, second = torch.ones(2)
    assert names[1] == "unbind"
    assert first == second


def test_gradients_are_switched_back_though_nobody_sees_it():
    mode, names = watching()
    with mode, torch.no_grad():
        pass
    assert names == []
    assert torch.is_grad_enabled()


def test_a_comparison_is_the_same_call_whichever_side_is_a_placeholder():
    mode, names = watching()
    real, made = torch.ones(2), Placeholder(torch.empty(2, device="meta"), torch.device("cpu"))
    with computing(), mode:
        for a, b in ((real, real), (real, made), (made, real)):
            a > b  # noqa: B015
            a <= b  # noqa: B015
    assert names == ["gt", "ge"] * 3


def test_a_mode_can_be_taken_off_from_below_others():
    mode, names = watching()
    with mode, torch.device("cpu"):
        assert current() is mode
        with unseen(mode):
            assert current() is None
            torch.ones(1)
        assert current() is mode
    assert "ones" not in names
    assert current() is None


def test_arguments_are_exchanged_in_their_containers():
    one, other = torch.ones(1), torch.zeros(1)
    given = (one, [one, {"key": one}], 3)
    found = exchanged(given, lambda tensor: other if tensor is one else tensor)
    assert tensors_in(found, []) == [other] * 3
    assert found[2] == 3
    assert exchanged(given[:1], lambda tensor: other)[0] is other


def test_arguments_without_such_tensors_stay_the_same_object():
    given = (torch.ones(1), [torch.ones(1)], 3)
    assert exchanged(given, lambda tensor: tensor) is given


@pytest.mark.parametrize(("given", "found"), [(3, 3), (torch.ones(2, 1), [(2, 1)]), ([torch.ones(1)], [(1,)])])
def test_what_python_learns_from_a_call(given, found):
    assert read(given) == found
