"""What a parent's code keeps in attributes for its next call.

YOLO's head keeps the anchors of the last shape, and makes them anew for another: with them in place the code takes
another way than in its dry run. So each micro-batch finds such attributes as they are in the model. A module in which
only numbers changed counts something, and tensors without numbers belong to one stage: both go on from call to call.

What a module that does not train first makes of weights alone (LeViT's table of biases) is the same each time: it is
made anew as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor

from pipeloom.batch.trees import flatten
from pipeloom.standins.clone import Clones
from pipeloom.standins.followed import OF_EVERY_MODULE, content_of, is_same
from pipeloom.standins.placeholder import Placeholder

_NONE = object()


class Caches:
    """The attributes of parents before their first call.

    Args:
        clones: of a dry run.
    """

    def __init__(self, clones: Clones) -> None:
        self._clones = clones
        self._before: dict[str, dict[str, Any]] = {}

    def note(self, units: Collection[str] | None) -> None:
        """Look at all parents, which are what is around units: their methods may be called without a forward."""
        inside = frozenset(units or ())
        for name, clone in self._clones.of.items() if units is not None else ():
            if not any(each in inside for each in _around(name)):
                own = vars(clone)
                self._before[name] = {key: content_of(own[key]) for key in own.keys() - OF_EVERY_MODULE}

    def found(self, is_of_weights: Callable[[Placeholder], bool]) -> tuple[tuple[str, str], ...]:
        """The attributes, by module and name.

        Args:
            is_of_weights: whether a placeholder was made of weights alone.
        """
        found: list[tuple[str, str]] = []
        for name, before in self._before.items():
            own = vars(self._clones.of[name])
            keys = [key for key in own if key not in OF_EVERY_MODULE]
            changed = [key for key in keys if not is_same(content_of(own[key]), before.get(key, _NONE))]
            kept = []
            for key in changed:
                values = [leaf for leaf in flatten(own[key])[0] if type(leaf) is Placeholder]
                is_made_anew = not own["training"] and all(map(is_of_weights, values)) and not _tensors(before.get(key))
                if not values or is_made_anew:
                    kept.append(key)
            if not all(isinstance(own[key], int | float) for key in kept):
                found += [(name, key) for key in kept]
        return tuple(found)


def _tensors(content: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(content)[0] if isinstance(leaf, Tensor)]


def _around(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
