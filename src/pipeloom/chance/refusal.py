"""What to do about a draw that is refused."""

from __future__ import annotations

from pipeloom.chance.generators import are_keyed

_BY_TORCH = "draw with torch instead, for example torch.rand(()).item() < p"


def remedy() -> str:
    """The hint: by torch, which always works, or with `key_draws`, for what that reaches."""
    if are_keyed():
        return (
            f"{_BY_TORCH}; pipeloom.chance.key_draws() does not reach a function that was imported by name (from "
            "random import random: call it by its module), nor what another library draws"
        )
    return (
        f"{_BY_TORCH}; or, where the code is not yours, call pipeloom.chance.key_draws() before the pipeline is made: "
        "random.random(), numpy.random.rand() and their like then draw as step, micro-batch and place say"
    )
