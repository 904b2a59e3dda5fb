"""Seeds that are tried where a model's own code fails for some draws."""

import pytest

from pipeloom.errors import SplitError
from pipeloom.splitting.survey import first_that_goes


def test_seeds_are_tried_in_their_order():
    """NLLB's loss over experts fails where chance skipped them all; a survey's best seed failed in the recording."""
    tried = []

    def make(seed):
        tried.append(seed)
        return 1 / (seed - 3)

    assert first_that_goes(make, [3, 5, 7]) == 0.5
    assert tried == [3, 5]


@pytest.mark.parametrize("error", [SplitError("cannot be cut"), IndexError("of the model")])
def test_what_no_seed_helps(error):
    def make(seed):
        tried.append(seed)
        raise error

    tried = []
    with pytest.raises(type(error)) as caught:
        first_that_goes(make, [3, 5])
    assert caught.value is error
    assert tried == ([3] if isinstance(error, SplitError) else [3, 5])
