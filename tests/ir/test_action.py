import pickle
from dataclasses import FrozenInstanceError

import pytest

from pipeloom.ir import Action, Kind


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(Kind.FORWARD, 0, 0), "0F0"),
        (Action(Kind.BACKWARD, 3, 12), "3B12"),
        (Action(Kind.INPUT_GRAD, 1, 2), "1I2"),
        (Action(Kind.WEIGHT_GRAD, 1, 2), "1W2"),
        (Action(Kind.RECOMPUTE, 1, 2), "1R2"),
        (Action(Kind.RECV_B, 10, 7), "10RECV_B7"),
        (Action(Kind.UPDATE, 2, 5), "2U5"),
    ],
)
def test_text_is_stage_kind_microbatch(action, text):
    assert str(action) == text


def test_actions_are_values():
    first, second = Action(Kind.FORWARD, 1, 2), Action(Kind.FORWARD, 1, 2)
    assert first == second
    assert len({first, second, Action(Kind.FORWARD, 2, 1)}) == 2


def test_action_is_not_a_tuple():
    """torch's action equals a bare tuple, so a typo in a comparison goes unseen."""
    assert Action(Kind.FORWARD, 1, 2) != (Kind.FORWARD, 1, 2)
    assert Kind.FORWARD != "F"


def test_actions_are_frozen():
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'stage'"):
        Action(Kind.FORWARD, 1, 2).stage = 3


def test_actions_travel_between_processes():
    action = Action(Kind.SEND_B, 4, 5)
    copy = pickle.loads(pickle.dumps(action))
    assert copy == action
    assert hash(copy) == hash(action)


def test_codes_differ():
    """The hash is made of them, because an enumeration's own differs from process to process."""
    assert sorted(kind.code for kind in Kind) == list(range(len(Kind)))


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_is_one_thing(kind):
    is_update = kind is Kind.UPDATE  # of a stage's weights, after a micro-batch: none of the four
    assert [kind.is_compute, kind.is_send, kind.is_recv, kind.is_of_stage, is_update].count(True) == 1
    assert kind.is_compute == (len(kind.value) == 1 and not is_update)
    assert kind.is_transfer == (kind.is_send or kind.is_recv)
    assert kind.text == kind.value
