"""`torch.utils.checkpoint` in a stage's forward, of the kind that hooks saved tensors (``use_reentrant=False``).

Its first forward keeps no activations, and the first node of the backward that wants one runs the forward again. torch
does that once for each backward, and small graphs have backwards of their own: left alone, each would recompute the
whole checkpoint [seen: 11.4 times the matrix products of one for 16 blocks]. So the first forward makes no small
graphs; the recomputation makes them, and the nth node of the first forward takes the nth small graph of it.

The other kind of checkpoint needs nothing from here: it runs a forward and a backward inside I, and both are split.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

_PACK = "_checkpoint_hook.__init__.<locals>.pack_hook"

Hooks = tuple[Callable[..., Any], Callable[..., Any]]


class Frame:
    """One call of a checkpoint.

    Args:
        torch_frame: torch's own record of it; its function to recompute is replaced by one that tells us.
        running: the recomputations that run now, innermost last.
    """

    def __init__(self, torch_frame: Any, running: list[Frame]) -> None:
        self.hooks: Hooks | None = None
        self._num_places = 0
        self._made_again: list[Any] = []
        recompute = torch_frame.recompute_fn

        def recompute_in_halves(*args: Any) -> Any:
            self.hooks, self._made_again = top_hooks(), []
            running.append(self)
            try:
                return recompute(*args)
            finally:
                running.pop()

        torch_frame.recompute_fn = recompute_in_halves

    def count(self) -> int:
        """Count a place of the first forward, and return its number."""
        self._num_places += 1
        return self._num_places - 1

    def note(self, place: Any) -> None:
        """Note a place of the recomputation."""
        self._made_again.append(place)

    def again(self, index: int) -> Any:
        """What the recomputation made of the ``index``-th place, to be taken once; None if it did not come so far."""
        if index >= len(self._made_again):
            return None
        place, self._made_again[index] = self._made_again[index], None
        return place


class Frames:
    """Finds the checkpoint that the forward is in."""

    def __init__(self) -> None:
        self._running: list[Frame] = []

    def current(self, hooks: Hooks) -> tuple[Frame | None, bool]:
        """The innermost checkpoint, whose hooks those are, and whether this is its first forward."""
        if self._running and self._running[-1].hooks == hooks:
            return self._running[-1], False
        found = _torch_frame(hooks[0])
        if found is None:  # hooks of the user's: what they make of a saved tensor serves I and W
            return None, False
        if not hasattr(found, "pipeloom_frame"):
            found.pipeloom_frame = Frame(found, self._running)
        return found.pipeloom_frame, True


def saving(*, is_first: bool) -> AbstractContextManager[None]:
    """Put this around a small graph in a checkpoint: the first forward saves nothing, the second for itself."""
    return saved_tensors_hooks(_nothing, _unused) if is_first else saved_tensors_hooks(_same, _same)


def top_hooks() -> Hooks | None:
    """The innermost hooks for saved tensors, the only ones that act."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def _torch_frame(pack: Any) -> Any:
    """The record behind a hook of torch's checkpoint, which nothing else leads to; the same in torch 2.9 and 2.13."""
    if getattr(pack, "__qualname__", None) != _PACK:
        return None
    return pack.__closure__[pack.__code__.co_freevars.index("frame")].cell_contents


def _nothing(_: Any) -> None:
    return None


def _unused(_: Any) -> Any:
    raise AssertionError("the small graph of a checkpoint's first forward is not used")


def _same(saved: Any) -> Any:
    return saved
