"""Recomputation of some modules alone: their activations are dropped, all others are kept.

R runs a whole stage again, before its backward. Where only some modules are to run again (an attention, an expert), it
is better done when their part of the backward comes: the activations of one of them are there at a time, and what
stands between them is not computed twice. That is `torch.utils.checkpoint`, put around the forward of each module while
a stage runs. What it leaves to its user is done here: buffers and counters are as the first forward found them, and
are changed once; a module that writes into its input is refused. Random draws are those of the first forward by
`draws`, and a backward in two halves recomputes once by `pipeloom.halves`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom.batch.trees import flatten, unflatten
from pipeloom.errors import BatchError
from pipeloom.runtime.batch_norm import frozen_buffers
from pipeloom.runtime.buffer_history import BufferHistory, Snapshot, version
from pipeloom.runtime.plain_history import PlainHistory


class RunAgain:
    """A module whose forward runs again in the backward; stands in for its ``forward``.

    Args:
        name: in the whole model.
        module: the module.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self._module = module
        self._history, self._plain = BufferHistory(module), PlainHistory(module)
        self._lock, self._num_inside = threading.Lock(), 0  # a layer that several stages call runs in several threads
        self._own: Any = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put this around forwards, in a backward too: they go through `__call__`; afterwards nothing is left."""
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                attributes = vars(self._module)
                self._forward, self._own = self._module.forward, attributes.get("forward")
                attributes["forward"] = self
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if self._num_inside == 0:
                    del self._module.forward
                    if self._own is not None:
                        vars(self._module)["forward"] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, without its activations.

        Raises:
            BatchError: it wrote into its input.
        """
        forward = self._forward
        leaves, structure = flatten((args, kwargs))
        before, num_runs = [version(leaf) for leaf in leaves if isinstance(leaf, Tensor)], count()

        # Leaf by leaf: torch looks whether arguments were written into, but not into containers and keywords.
        def run(*given: Any) -> Any:
            is_first = next(num_runs) == 0
            own_args, own_kwargs = unflatten(list(given) if is_first else list(map(_apart, given)), structure)
            return forward(*own_args, **own_kwargs)

        output = checkpoint(run, *leaves, use_reentrant=False, context_fn=self._contexts)
        if before != [version(leaf) for leaf in leaves if isinstance(leaf, Tensor)] and torch.is_grad_enabled():
            raise BatchError(
                f"{self.name!r} was asked to run again in the backward, and wrote into its input in place; there is "
                "nothing left to run from",
                "do not write in place there, leave it out of recompute=, or recompute its whole stage (True)",
            )
        return output

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What is put around the first forward, and around the second."""
        buffers: dict[Any, Any] = {}
        running: list[tuple[int, int]] = []
        first, again = self._first(buffers, running), partial(self._again, buffers, running, self._plain.now())
        return first, _Often(again)

    @contextmanager
    def _first(self, buffers: dict[Any, Any], running: list[tuple[int, int]]) -> Iterator[None]:
        with self._history.forward() as found:
            buffers.update(found)
            running += self._versions()
            yield
        running.clear()

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(each), version(each)) for each in self._module.buffers()]

    @contextmanager
    def _again(self, buffers: Snapshot, running: list[tuple[int, int]], plain: Any) -> Iterator[None]:
        if running and running != self._versions():  # what buffers held is known only when it has ended
            raise BatchError(
                f"{self.name!r} was asked to run again in the backward; its forward writes a buffer, and then "
                "differentiates what it has computed: it would run again there and then, with the buffer as written",
                "let it differentiate first, leave it out of recompute=, or recompute its whole stage (True)",
            )
        with frozen_buffers(self._module, buffers), self._plain.as_they_were(plain):
            yield


class _Often(AbstractContextManager[None]):
    """A context that may be entered again: a forward that differentiates runs once more for each time that it does.

    Args:
        make: makes one that is good for once.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self._entered.append(made := self._make())
        made.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _apart(leaf: Any) -> Any:
    """An input as the second forward gets it: hooks that it puts there must not act on the first one's.

    Weights, and what `pipeloom.halves` knows to be computed from weights, stay themselves: they are told by that.
    """
    is_own = not isinstance(leaf, Tensor) or not leaf.requires_grad or isinstance(leaf, nn.Parameter)
    return leaf if is_own or hasattr(leaf, "pipeloom_source") else leaf.detach().requires_grad_()


def running_again(modules: Sequence[RunAgain]) -> AbstractContextManager[Any]:
    """Put this around the forward of a stage, and around its backward."""
    return _in_place(modules) if modules else _AS_THEY_ARE


@contextmanager
def _in_place(modules: Sequence[RunAgain]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in modules:
            stack.enter_context(each.in_place())
        yield


_AS_THEY_ARE = nullcontext()
