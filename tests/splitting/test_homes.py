"""Which stage runs which call."""

import pytest

from pipeloom.errors import SplitError
from pipeloom.splitting.homes import stages_of

FIRST = [("embed", 0), ("block", 0), ("embed", 1), ("head", 0)]
DECIDED = {("embed", 0): 0, ("block", 0): 1, ("embed", 1): 2, ("head", 0): 3, ("branch", 0): 1}


@pytest.mark.parametrize(
    ("names", "stages"),
    [
        (["embed", "block", "embed", "head"], [0, 1, 2, 3]),
        (["embed", "embed", "block", "head"], [0, 0, 1, 3]),
        (["embed", "branch", "head"], [0, 1, 3]),
        (["embed", "block", "new", "head"], [0, 1, 1, 3]),
    ],
    ids=["as at first", "earliest that has it", "skipped at first", "never seen"],
)
def test_a_call_goes_to_the_next_stage_that_has_its_unit(names, stages):
    calls = [(name, names[:i].count(name)) for i, name in enumerate(names)]
    assert stages_of(calls, FIRST, DECIDED) == stages


def test_a_unit_of_an_earlier_stage_cannot_be_called_again():
    with pytest.raises(SplitError, match="calls 'block' of stage 1 after units of stage 3"):
        stages_of([("head", 0), ("block", 0)], FIRST, DECIDED)
