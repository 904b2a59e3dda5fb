"""Where stages begin."""

import pytest

from pipeloom.errors import SplitError
from pipeloom.recording.ops import Kind, Op, Recording
from pipeloom.splitting.cuts import place_cuts
from pipeloom.splitting.together import Bond

NAMES = ["embed", "blocks.0.a", "blocks.0.b", "blocks.1", "blocks.2", "head"]


def placed(num_stages=None, cuts=None, together=(), weights=(1,) * 6):
    recording = Recording([Op(i, Kind.UNIT, name) for i, name in enumerate(NAMES)])
    return place_cuts(recording, weights, num_stages, cuts, together)


def test_stages_are_balanced_by_weight():
    assert placed(3) == [2, 4]
    assert placed(2, weights=(10, 1, 1, 1, 1, 1)) == [1]


def test_a_balanced_cut_separates_nothing_that_belongs_together():
    assert placed(2, together=[Bond(1, 4)]) in ([1], [5])


@pytest.mark.parametrize(
    ("cuts", "found"),
    [([2, 5], [2, 5]), (["blocks.1"], [3]), (["blocks.0", "head"], [1, 5]), (["blocks.0.b"], [2])],
)
def test_cuts_are_indices_or_names(cuts, found):
    assert placed(cuts=cuts) == found


def test_as_many_numbers_as_stages_are_sizes():
    assert placed(3, cuts=[1, 2, 3]) == [1, 3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_stages": 7}, "the model has 6 parts that a cut can separate"),
        ({"num_stages": 3, "together": [Bond(0, 4)]}, "2 parts .* separate: embed to blocks.2, head. The calls from"),
        ({"cuts": [2, 2]}, "they must ascend"),
        ({"cuts": [0]}, "they must ascend"),
        ({"cuts": ["nowhere"]}, "no module of that name was called"),
        ({"cuts": [2], "num_stages": 3}, "make 2 stages, but num_stages=3"),
        ({"cuts": [2], "together": [Bond(1, 3)]}, "memory is shared between them and written"),
    ],
)
def test_cuts_that_make_no_sense_are_refused(options, said):
    with pytest.raises(SplitError, match=said):
        placed(**options)
