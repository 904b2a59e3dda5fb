"""The cut is the optimum, whatever the weights: held against all possible cuts."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.splitting import balanced_cuts


def heaviest(weights, cuts):
    return max(sum(weights[start:end]) for start, end in pairwise([0, *cuts, len(weights)]))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.data())
def test_no_cut_is_lighter(weights, data):
    num_parts = data.draw(st.integers(1, len(weights)))
    found = balanced_cuts(weights, num_parts)
    others = combinations(range(1, len(weights)), num_parts - 1)
    assert heaviest(weights, found) == min(heaviest(weights, cuts) for cuts in others)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.data())
def test_every_part_has_an_item(weights, data):
    num_parts = data.draw(st.integers(1, len(weights)))
    cuts = balanced_cuts(weights, num_parts)
    assert len(cuts) == num_parts - 1
    assert all(before < after for before, after in pairwise([0, *cuts, len(weights)]))


@pytest.mark.parametrize(
    ("weights", "num_parts", "cuts"),
    [
        ([1, 1, 1, 1], 2, [2]),
        ([9, 1, 1, 1], 2, [1]),
        ([1, 1, 1, 9], 3, [1, 3]),
        ([5, 5, 5], 3, [1, 2]),
        ([1, 2, 3], 1, []),
        ([0, 0, 0], 2, [1]),
    ],
)
def test_known_cuts(weights, num_parts, cuts):
    assert balanced_cuts(weights, num_parts) == cuts
