"""Whether a call of a module in a parent's code is one that a stage can answer."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from pipeloom.recording.values import Values
from pipeloom.standins.clone import Clones
from pipeloom.standins.functions import look
from pipeloom.standins.glue import Seen, current
from pipeloom.standins.placeholder import Placeholder, Unseen, storage_of


def check_outside() -> None:
    """Raise within a transform that is not seen as one call.

    Raises:
        Unseen: it is one.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        raise Unseen("a transform (torch.func's vmap or grad) runs the code; what is inside has no values to send")


def check_seen(name: str, mode: Seen, clones: Clones, values: Values) -> None:
    """Raise for a call that cannot be answered with a value.

    Args:
        name: of the module.
        mode: sees the code of parents.
        clones: of the model.
        values: of the dry run.

    Raises:
        Unseen: it is made where nothing is seen, or with other weights.
    """
    check_outside()
    if current() is not mode:
        raise Unseen(
            f"{name!r} is called from another thread, or within one call of a custom autograd.Function, where calls "
            "of other stages' modules cannot be answered"
        )
    look()
    for inner, clone in clones.below(name).items():
        for key, weight in clone._parameters.items():
            if isinstance(weight, Placeholder) and not values.is_weight(weight):
                place = ".".join(each for each in (name, inner, key) if each)
                raise Unseen(
                    f"{name!r} is called with another tensor in the place of its parameter {place!r} "
                    "(torch.func.functional_call); each stage calls the modules that it has, with the weights they have"
                )


def check_written(given: list[Tensor], written: set[int], values: Values, units: Collection[str]) -> None:
    """Raise for code of a parent that writes into weights of units.

    Args:
        given: what a call of glue was given.
        written: the memory that it wrote into.
        values: of the dry run.
        units: names of all units.

    Raises:
        Unseen: each stage has the weights of its own units, and each micro-batch would write once more.
    """
    for each in given if written else ():
        module, key = values.weight_at(storage_of(each)) if storage_of(each) in written else ("", "")
        if any(module == unit or module.startswith(f"{unit}.") for unit in units):
            raise Unseen(
                f"the parameter {f'{module}.{key}'!r} is written into, which another stage may have, and which other "
                "micro-batches use meanwhile; do that before the step, or switch it off"
            )
