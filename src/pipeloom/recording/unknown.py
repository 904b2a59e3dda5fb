"""A number that only the stage of a unit knows: whoever wants to compute with it is told so."""

from __future__ import annotations

from typing import Any, NoReturn

from pipeloom.recording.placeholder import NoNumbers

_USES = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "matmul", "rmatmul", "neg", "pos", "abs", "round", "trunc", "floor", "ceil", "and", "or", "xor"),
    *("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "index", "len", "iter", "getitem", "contains"),
)


class Unknown:
    """Stands in an attribute of a module for a plain value that its code made of numbers.

    Args:
        name: of the attribute, with its module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}, which a unit makes of numbers>"

    __hash__ = object.__hash__


def _refused(self: Unknown, *_: Any) -> NoReturn:
    raise NoNumbers(f"{self._name} is a number that a unit makes of numbers, and only its stage has it")


for _use in _USES:
    setattr(Unknown, f"__{_use}__", _refused)
