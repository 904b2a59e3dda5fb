"""Which values count as whole numbers."""

from typing import Any

import numpy as np
import pytest

from pipeloom.ir.counts import is_whole


@pytest.mark.parametrize("value", [0, -3, 2**70, np.int64(2), np.uint8(1)])
def test_whole_numbers(value: Any) -> None:
    assert is_whole(value)


@pytest.mark.parametrize("value", [True, np.bool_(True), 2.0, "2", None, [2], np.array([2]), np.float64(2)])
def test_values_that_are_no_whole_numbers(value: Any) -> None:
    assert not is_whole(value)
