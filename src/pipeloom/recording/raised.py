"""Calls that raised, and whose exception the model's code caught: ``try: layer(x, mask)``, ``except TypeError``.

Shapes and types decide that, so such a call raises on every stage, wherever the module is.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pipeloom.recording.ops import Kind, Op
from pipeloom.standins.functions import Met
from pipeloom.standins.placeholder import NoNumbers


@contextmanager
def raised(ops: list[Op], calls: Counter[str]) -> Iterator[None]:
    """Put this around a call: if it raises, its op is one that raises on every stage, and uses nothing.

    Args:
        ops: gets the op of the call, and no more.
        calls: of each unit so far.
    """
    index = len(ops)
    try:
        yield
    except (NoNumbers, Met):
        raise
    except Exception as error:
        if len(ops) > index:
            was = ops[index]
            if was.kind is Kind.UNIT and calls[was.what] > was.call:
                calls[was.what] -= 1
            ops[index:] = [Op(index, Kind.EVERYWHERE, was.what, was.func, module=was.module, raised=_bare(error))]
        raise


def again(error: Exception) -> Exception:
    """The exception to raise in the place of one that was seen; one alike, because stages run at the same time."""
    try:
        return _bare(copy.copy(error))
    except Exception:  # not every exception can be copied
        return error


def _bare(error: Exception) -> Exception:
    """Without what was running."""
    try:
        made = copy.copy(error)
    except Exception:  # not every exception can be copied
        return error
    return made.with_traceback(None)
