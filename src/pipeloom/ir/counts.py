"""What counts as a whole number: Python's own and numpy's, but not True, which an ``isinstance`` of int lets in."""

from __future__ import annotations

import numbers
from typing import Any, TypeGuard


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether ``value`` can be used wherever a count or an index is needed."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
