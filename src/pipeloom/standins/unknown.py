"""A number that only the stage of a unit knows: whoever wants to compute with it is told so."""

from __future__ import annotations

from typing import Any, NoReturn

from pipeloom.standins.placeholder import NoNumbers

_USES = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "matmul", "rmatmul", "neg", "pos", "abs", "round", "trunc", "floor", "ceil", "and", "or", "xor"),
    *("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "index", "len", "iter", "getitem", "contains"),
)


class Unknown:
    """Stands for a plain value that a unit made of numbers, in an attribute or in what it returned.

    Args:
        name: of the attribute, with its module; or what it is.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}, which a unit makes of numbers>"

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Called for ``torch.mul(x, unknown)``, which would call it a wrong type."""
        found = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, cls)]
        _refused(found[0] if found else cls(f"what {func.__name__} was given"))


def _refused(self: Unknown, *_: Any) -> NoReturn:
    raise NoNumbers(f"{self._name} is a number that a unit makes of numbers, and only its stage has it")


for _use in _USES:
    setattr(Unknown, f"__{_use}__", _refused)
