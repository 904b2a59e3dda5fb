"""The weights of a stage while micro-batches on their way use older versions of them.

A graph remembers the leaf that it was made with, so each version that is in use has leaves of its own, which stand in
the modules' places while a micro-batch of that version is run there. The user's parameters are never part of a graph:
the gradient of a leaf becomes theirs, the optimizer updates them in place, and the next forward uses a new leaf.

The leaves of the newest version are on the parameters' own memory. Only if somebody still uses them when the update
comes, the parameters move to new memory first. So a stage holds as many copies of its weights as
`pipeloom.ir.versions.peak_versions_held` counts, and one whose forward is always followed by its backward copies none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.copies import copied_alike, leaf_like
from pipeloom.errors import RuntimeStateError
from pipeloom.ir import Action, Kind
from pipeloom.ir.action import BACKWARD_KINDS, COMPUTE_KINDS, LAST_KINDS
from pipeloom.runtime.buffer_history import version
from pipeloom.runtime.executor import Handler
from pipeloom.splitting.ties import hooked


class StageWeights:
    """The trainable weights of one stage, for one stream of batches.

    Args:
        modules: the stage's.
        used: per micro-batch, the version that it uses; version k are the weights after k updates.
        update: the optimizer's step, called when the parameters have the gradients of a batch.

    Attributes:
        peak_held: the most versions that were held at once.
    """

    def __init__(self, modules: Iterable[nn.Module], used: Sequence[int], update: Callable[[], None]) -> None:
        every = dict.fromkeys(module for each in modules for module in each.modules())
        self._places = [
            (module, name, weight)
            for module in every
            for name, weight in module._parameters.items()
            if weight is not None and weight.requires_grad
        ]
        self._weights = list(dict.fromkeys(weight for _, _, weight in self._places))
        self._used = used
        self._users = Counter(used)
        self._update = update
        self._newest = 0
        self._is_over = False
        self._leaves: dict[int, dict[nn.Parameter, nn.Parameter]] = {}
        self.peak_held = 1

    @contextmanager
    def used_by(self, microbatch: int, *, is_backward: bool) -> Iterator[None]:
        """Around what is run for a micro-batch: the modules have the version that it uses.

        Raises:
            RuntimeStateError: the backward found a gradient of a parameter itself, not of the version's leaf; or the
                forward wrote into the leaf.
        """
        leaves = self._leaves_of(self._used[microbatch])
        before = [version(leaf) for leaf in leaves.values()]
        try:  # Ctrl-C may fall after any call
            _put(self._places, leaves)
            if is_backward:  # autograd adds to what is there, so a batch's gradient adds up as it always does
                for weight, leaf in leaves.items():
                    leaf.grad, weight.grad = weight.grad, None
            yield
            if is_backward and any(weight.grad is not None for weight in self._weights):
                raise self._used_directly()
            if before != [version(leaf) for leaf in leaves.values()]:
                raise self._written(leaves, before)
        finally:
            _put(self._places, None)
            if is_backward:
                for weight, leaf in leaves.items():
                    weight.grad, leaf.grad = None if self._is_over else leaf.grad, None

    def end(self) -> None:
        """The call has failed: modules have the parameters, although a forward or backward may still be running."""
        self._is_over = True
        _put(self._places, None)

    def is_done(self, microbatch: int) -> None:
        """A micro-batch has had its backward, whole: what only it used is let go."""
        used = self._used[microbatch]
        self._users[used] -= 1
        if not self._users[used] and used < self._newest:
            del self._leaves[used]

    def update(self) -> None:
        """Make the next version, from the gradients that the parameters have."""
        if self._users[self._newest]:
            self._leaves_of(self._newest)
            for weight in self._weights:  # in no graph: those have leaves, which keep the memory
                weight.data = copied_alike(weight.data)
        else:
            self._leaves.pop(self._newest, None)
        self._newest += 1
        self.peak_held = max(self.peak_held, 1 + len(self._leaves))
        self._update()

    def _leaves_of(self, wanted: int) -> dict[nn.Parameter, nn.Parameter]:
        """By parameter, the leaf that stands for it; those of the newest version are made when first asked for."""
        if wanted not in self._leaves:
            assert wanted == self._newest, "`verify` lets no forward use a version that is gone or not made yet"
            self._leaves[wanted] = {weight: _leaf(weight) for weight in self._weights}
        return self._leaves[wanted]

    def _used_directly(self) -> RuntimeStateError:
        module, name = next((m, n) for m, n, weight in self._places if weight.grad is not None)
        return RuntimeStateError(
            f"the stage used the parameter {name!r} of a {type(module).__name__} by a reference kept elsewhere than in "
            "the module, so it would not use the version of the weights that its micro-batch is due",
            "read parameters as attributes of their module in the forward",
        )

    def _written(self, leaves: Mapping[nn.Parameter, nn.Parameter], before: Sequence[int]) -> RuntimeStateError:
        weight = next(w for (w, leaf), old in zip(leaves.items(), before, strict=True) if version(leaf) != old)
        module, name = next((m, n) for m, n, each in self._places if each is weight)
        return RuntimeStateError(
            f"the forward of a {type(module).__name__} wrote into its parameter {name!r} (as max_norm of an embedding "
            "does); in a stream that changes one of several versions of it, and no other",
            "let the optimizer's register_step_post_hook do it after each update",
        )


class Versions:
    """The weights of this process's stages, and what each action does with them.

    Args:
        stages: by index.
    """

    def __init__(self, stages: Mapping[int, StageWeights]) -> None:
        self.stages = stages

    def around(self, table: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
        """The handlers of a rank, each run with the version of the weights that is due, and that of U."""
        uses = {kind: partial(self._with_weights, handler) for kind, handler in table.items() if kind in COMPUTE_KINDS}
        return {**table, **uses, Kind.UPDATE: self._update}

    def end(self) -> None:
        """Let modules have their parameters again, whatever ranks still do."""
        for weights in self.stages.values():
            weights.end()

    def _with_weights(self, handler: Handler, action: Action, given: tuple[Any, ...]) -> Any:
        weights = self.stages[action.stage]
        with weights.used_by(action.microbatch, is_backward=action.kind in BACKWARD_KINDS):
            made = handler(action, given)
        if action.kind in LAST_KINDS:
            weights.is_done(action.microbatch)
        return made

    def _update(self, action: Action, _: tuple[Any, ...]) -> None:
        self.stages[action.stage].update()


def _put(
    places: Iterable[tuple[nn.Module, str, nn.Parameter]], leaves: Mapping[nn.Parameter, nn.Parameter] | None
) -> None:
    """Put a version's leaves, or None: the parameters themselves, into the modules."""
    for module, name, weight in places:
        parameter = weight if leaves is None else leaves[weight]
        if isinstance(module, nn.RNNBase):  # keeps a list of them, which only this way is kept up
            setattr(module, name, parameter)
        else:
            module._parameters[name] = parameter


def _leaf(weight: nn.Parameter) -> nn.Parameter:
    """A leaf on the parameter's memory, with its hooks; writes to the two are counted apart."""
    leaf = leaf_like(weight, weight.data)
    if hasattr(weight, "grad_dtype") and weight.grad_dtype != leaf.grad_dtype:
        leaf.grad_dtype = weight.grad_dtype
    if weight._backward_hooks:
        leaf.register_hook(partial(hooked, weight))  # type: ignore[no-untyped-call]
    return leaf


def check_weight(name: str, weight: nn.Parameter) -> None:
    """Raise if a weight has a gradient already, or waits for one that adds up in itself.

    Raises:
        RuntimeStateError: it does.
    """
    if getattr(weight, "_post_accumulate_grad_hooks", None):
        raise RuntimeStateError(
            f"parameter {name!r} has a hook that runs after its gradient was accumulated; in a stream they add up in "
            "leaves of each version, where it would not run",
            "let the optimizer's register_step_pre_hook do its work",
        )
    if weight.grad is not None:
        raise RuntimeStateError(
            f"parameter {name!r} has a gradient already; a stream would mix it into its first update",
            "call zero_grad() before",
        )


def check_memory(tensors: Mapping[str, Tensor]) -> None:
    """Raise if a trainable weight lies where another parameter or a buffer does; an update may move it elsewhere.

    Args:
        tensors: the different ones of this process, by name.

    Raises:
        RuntimeStateError: one does.
    """
    spans: dict[tuple[torch.device, int], list[tuple[int, int, str, bool]]] = defaultdict(list)
    for name, each in tensors.items():
        if each.layout is torch.strided and each.numel() and not each.is_meta:
            extent = 1 + sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
            start, end = (
                int(at) * each.element_size() for at in (each.storage_offset(), each.storage_offset() + extent)
            )
            is_moved = isinstance(each, nn.Parameter) and each.requires_grad
            spans[each.device, each.untyped_storage().data_ptr()].append((start, end, name, is_moved))
    for found in spans.values():
        for (_, end, name, is_moved), (start, _, other, other_is_moved) in combinations(sorted(found), 2):
            if start < end and (is_moved or other_is_moved):
                raise RuntimeStateError(
                    f"{name!r} and {other!r} share memory without being one parameter; an update of a stream may move "
                    "a weight to new memory, and the other would keep the old numbers",
                    "make them one nn.Parameter, or let the forward compute the one from the other",
                )
