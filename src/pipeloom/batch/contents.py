"""Lists, dicts, sets and deques as they were: a copy, and the same container filled with it again.

By the classes of Python's own, and not by `copy` or `update`: a class derived from one may have another constructor,
as a record of fields has, or refuse to be updated.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from operator import is_
from typing import Any

FILLED: tuple[Any, ...] = (list, OrderedDict, dict, set, deque)
"""Those whose content changes."""

CONTAINERS: tuple[Any, ...] = (*FILLED, tuple, frozenset)


def entries(container: Any) -> list[Any]:
    """What lies in it by now; of a dict its values."""
    return list(_own(container).values(container) if isinstance(container, dict) else container)


def copy_of(container: Any) -> Any:
    """Its content, for `fill`; in one go, as another thread may write it."""
    if isinstance(container, OrderedDict):
        return dict(OrderedDict.items(container))
    if isinstance(container, dict):
        return dict.copy(container)
    return set(container) if isinstance(container, set) else list(container)


def fill(container: Any, content: Any, instead: Mapping[int, Any]) -> None:
    """Give it this content, unless it has it: another thread may hold it too, as long as nothing changes.

    Args:
        container: one of `FILLED`.
        content: from `copy_of`.
        instead: what takes the place of entries, by their ``id``; not in a set.
    """
    own = _own(container)
    if isinstance(container, set):
        if container != content:
            own.clear(container)
            own.update(container, content)
    elif isinstance(container, dict):
        _fill_dict(container, _with(content, instead))
    elif not _is_same(container, content := _with(content, instead)):
        own.clear(container)
        own.extend(container, content)


def _fill_dict(container: dict[Any, Any], content: dict[Any, Any]) -> None:
    own = _own(container)
    if not _is_same(own.keys(container), content) or not _is_same(own.values(container), content.values()):
        own.clear(container)
        for key, value in content.items():
            own.__setitem__(container, key, value)


def _own(container: Any) -> Any:
    return next(each for each in FILLED if isinstance(container, each))


def _with(content: Any, instead: Mapping[int, Any]) -> Any:
    if not instead:
        return content
    if isinstance(content, dict):
        return {key: instead.get(id(each), each) for key, each in content.items()}
    return [instead.get(id(each), each) for each in content]


def _is_same(now: Any, then: Any) -> bool:
    """Without a list of what is there now: it may be a vocabulary, and is looked at twice for each micro-batch."""
    return len(now) == len(then) and all(map(is_, now, then))
