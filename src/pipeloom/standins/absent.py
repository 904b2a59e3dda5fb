"""A model of which other processes have a part, called itself: `model.generate()` between two steps.

torch would say that a tensor is on the meta device. Stages run clones of the model, which do not have what stands here.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pipeloom.errors import RuntimeStateError
from pipeloom.standins.clone import COMPILED


class _Absent:
    """What is called in the model's place."""

    def __init__(self, root: nn.Module, num_elsewhere: int, num_stages: int) -> None:
        self.name = f"the {type(root).__name__}"
        self.lack = f"{num_elsewhere} of its {num_stages} stages are in other processes"

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeStateError(
            f"{self.name} was called itself, and {self.lack}",
            "call the pipeline, pipe(...), and to generate go on with what pipe.unwrap() gives back on every rank",
        )


def stand_in(root: nn.Module, num_elsewhere: int, num_stages: int) -> None:
    """From now on a call of the model itself is an error, if any of its stages is elsewhere."""
    if num_elsewhere and vars(root).get(COMPILED) is None:
        root.__dict__[COMPILED] = _Absent(root, num_elsewhere, num_stages)


def give_way(root: nn.Module) -> None:
    """The model is whole again."""
    if isinstance(vars(root).get(COMPILED), _Absent):
        root.__dict__[COMPILED] = None


def check_here(model: Any) -> None:
    """Raise for a model of which an earlier pipeline has given a part away.

    Raises:
        RuntimeStateError: it is one.
    """
    absent = getattr(model, COMPILED, None)
    if isinstance(absent, _Absent):
        raise RuntimeStateError(
            f"{absent.name} was given to a pipeline, and {absent.lack}: another pipeline was made of it",
            "unwrap() that one on every rank before; after close() the model has to be made anew",
        )
