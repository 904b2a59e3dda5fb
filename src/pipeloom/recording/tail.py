"""The rest of a model's code, once it looks at numbers: the last stage runs it as it is, after no plan.

A loss inside the model checks what a distribution is made of, or matches boxes with targets: what it calls next depends
on numbers that no dry run has. All that is known is what such code can still reach: the tensors in the variables of the
functions that are running. The last stage gets those.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from pipeloom.standins.followed import OF_EVERY_MODULE

_DEPTH = 12
_NO_STATE = (type, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float)


def reachable(error: BaseException) -> list[Tensor]:
    """The tensors in the variables of the functions that an error went through, each once."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()

    def look(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif depth and id(value) not in seen and not isinstance(value, _NO_STATE):
            seen.add(id(value))
            for each in _parts(value):
                look(each, depth - 1)

    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if not frame.f_globals.get("__name__", "").startswith("pipeloom."):
            look(dict(frame.f_locals), _DEPTH)
        traceback = traceback.tb_next
    return list(found.values())


def _parts(value: Any) -> Iterator[Any]:
    if type(value).__module__.startswith("pipeloom."):
        return
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, nn.Module):  # its weights and children are where they were
        yield from [each for key, each in vars(value).items() if key not in OF_EVERY_MODULE]
        return
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        yield from [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
        return
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    yield from getattr(value, "__dict__", {}).values()


_EMPTY = types.CellType()
