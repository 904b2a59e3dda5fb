"""What is no tensor comes back equal, and of the same type, through JSON that runs nothing."""

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.checkpoint.values import decode, encode
from pipeloom.errors import CheckpointError

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
KEYS = st.integers(0, 9) | st.text(max_size=4) | st.tuples(st.integers(0, 9), st.booleans())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$tuple", "$float", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "value"), allow_nan=False)))


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@given(VALUES)
def test_any_value_comes_back_with_its_types(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize("number", [math.inf, -math.inf, 0.1, 5e-324, 1e308])
def test_numbers_keep_every_bit(number: float) -> None:
    assert through_json(number).hex() == number.hex()
    assert math.isnan(through_json(math.nan))


def test_milestones_of_a_scheduler_stay_a_counter() -> None:
    value = through_json({"milestones": Counter({30: 1, 80: 2}), "last_epoch": 4})
    assert isinstance(value["milestones"], Counter)
    assert sorted(value["milestones"].elements()) == [30, 80, 80]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensor_of_one_number_comes_back(dtype: torch.dtype) -> None:
    tensor = torch.tensor(1 / 3).to(dtype)
    loaded = through_json({"lr": tensor})["lr"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor)


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Odd(), "the state is of type Odd, which cannot be saved without a program"),
        ({"a": [1, Odd()]}, r"the state\['a'\]\[1\] is of type Odd"),
        ({"f": print}, r"the state\['f'\] is of type builtin_function_or_method"),
        ({Odd: 1}, "the state is of type type"),
        (torch.zeros(2), "the state is of type Tensor"),
        ({1, 2}, "the state is of type set"),
        (b"bytes", "the state is of type bytes"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_its_place(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode(value, "the state")


@pytest.mark.parametrize(
    "value",
    [
        {"$eval": "print('run')"},
        {"$float": "__import__('os')"},
        {"$tensor": ["ops", 1]},
        {"$tensor": 3},
        {"$dict": [[[], 1]]},
        {"$counter": 3},
        {"$tuple": None},
    ],
)
def test_other_marks_are_refused_and_run_nothing(value: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError), match=r"."):
        decode(value)


def test_plain_json_stays_as_it_is() -> None:
    plain = {"train": {"steps": 9, "names": ["a", None, True]}, "rate": 0.5}
    assert encode(plain, "value") == plain
    assert decode(plain) == plain
