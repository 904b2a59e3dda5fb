"""Flat leaves and back, for any nesting."""

from collections import OrderedDict, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.batch.trees import flatten, unflatten

Pair = namedtuple("Pair", ["left", "right"])

leaf = st.none() | st.integers() | st.text(max_size=3)
trees = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
    ),
    max_leaves=12,
)


@given(trees)
def test_flatten_and_back(tree):
    leaves, structure = flatten(tree)
    found = unflatten(leaves, structure)
    assert found == tree
    assert type(found) is type(tree)


@given(trees)
def test_leaves_are_no_containers(tree):
    leaves, structure = flatten(tree)
    assert not any(isinstance(each, list | tuple | dict) for each in leaves)
    assert flatten(unflatten(list(range(len(leaves))), structure))[0] == list(range(len(leaves)))


def test_order_of_leaves_is_that_of_the_tree():
    tree = {"b": [1, (2, {"c": 3})], "a": Pair(4, OrderedDict(z=5, y=6))}
    assert flatten(tree)[0] == [1, 2, 3, 4, 5, 6]
    assert unflatten([6, 5, 4, 3, 2, 1], flatten(tree)[1])["a"] == Pair(3, OrderedDict(z=2, y=1))


@pytest.mark.parametrize("value", [None, 3, "text", (), [], {}])
def test_no_leaf_and_one_leaf(value):
    leaves, structure = flatten(value)
    assert len(leaves) == (0 if value in ((), [], {}) else 1)
    assert unflatten(leaves, structure) == value
