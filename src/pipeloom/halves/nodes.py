"""What stands in the stage's graph for a function that was split, and for a weight whose gradient waits for W."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.nn import functional

from pipeloom.errors import RuntimeStateError
from pipeloom.halves.frames import Frame, Frames, top_hooks
from pipeloom.halves.waiting import Waiting

_HINT = "use a schedule with whole backwards (1f1b, gpipe) for this model"


@dataclass(slots=True)
class Place:
    """Where a small graph ends, and a walk of W begins.

    Args:
        waiting: of the micro-batch.
        edge: the output of the small graph; None where there is none (yet).
        inputs: the detached activations that the small graph begins with.
        weight: of a `linear` whose input gradient is one product (`is_one_product`), which needs no walk.
        frame: the checkpoint that it is in.
        index: which place of the checkpoint's first forward; None in its recomputation.
        order: the number of the output's node, by which the engine orders its walk.
    """

    waiting: Waiting
    edge: GradientEdge | None
    inputs: tuple[Tensor, ...]
    weight: Tensor | None = None
    frame: Frame | None = None
    index: int | None = None
    order: int = 0

    def now(self) -> Place:
        """This place; or, in a checkpoint, the one that its recomputation has made."""
        again: Place | None = None if self.frame is None or self.index is None else self.frame.again(self.index)
        if again is None:
            return self
        if again.edge is not None:
            # W goes in the order of the forward; recomputations come in the reverse.
            again.edge.node._set_sequence_nr(self.order)  # type: ignore[attr-defined]
        return again

    def leave(self, grad: Tensor) -> GradientEdge:
        """Keep the gradient of the output for W.

        Raises:
            RuntimeStateError: this backward is no I, or it is to be differentiated itself, or it is the second.
        """
        if torch.is_grad_enabled():
            raise RuntimeStateError(
                "a backward that is to be differentiated again (create_graph=True) ran through a stage whose "
                "backward is split into I and W; what waits for W has no graph",
                _HINT,
            )
        if not self.waiting.is_collecting:
            raise RuntimeStateError(
                "a backward ran through a stage whose backward is split into I and W, and it was not I; the gradients "
                "of the stage's weights would be missing",
                _HINT,
            )
        edge, self.edge = self.edge, None
        if edge is None:
            raise RuntimeStateError(
                "a second backward (retain_graph=True) ran through a stage whose backward is split into I and W; the "
                "first has freed the graph",
                _HINT,
            )
        self.waiting.add(edge, grad)
        return edge


def place(
    waiting: Waiting, frames: Frames, output: Tensor, small: tuple[Tensor, ...] | None, weight: Tensor | None = None
) -> Place:
    """The place of ``output``, noted by the checkpoint that it is in.

    Args:
        waiting: of the micro-batch.
        frames: finds the checkpoint.
        output: with its graph.
        small: what the graph begins with, if it was made for this function; in a checkpoint's first forward it has
            saved nothing, and the recomputation makes it again. None: the graph of a weight, which stays.
        weight: see `Place`.
    """
    node: Any = output.grad_fn
    # Not by `get_gradient_edge`, whose checks take as long as the rest.
    edge = get_gradient_edge(output) if node is None else GradientEdge(node, output.output_nr)
    hooks = top_hooks()
    frame, is_first = (None, False) if hooks is None else frames.current(hooks)
    if frame is None:
        return Place(waiting, edge, small or (), weight)
    if is_first:
        here = edge if small is None else None
        return Place(waiting, here, (), None, frame, frame.count(), edge.node._sequence_nr())
    frame.note(Place(waiting, edge, small or (), weight))
    return Place(waiting, None, (), None, frame)


def is_one_product(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether autograd finds the input gradient of this call by ``grad.mm(weight)``, whatever its shapes and modes."""
    if function is not functional.linear or len(args) < 2:
        return False
    value, weight = args[:2]
    return (
        value.dtype == weight.dtype
        and not weight.is_complex()  # whose conjugate it would be
        and weight.ndim == 2
        and not torch.is_autocast_enabled(value.device.type)
        and value.ndim > 1
        and value.is_contiguous()
        and value.numel() > value.shape[-1] > 1
    )


class Split(torch.autograd.Function):
    """A function that was split: gives on the gradients of its activations, and leaves that of its output for W."""

    @staticmethod
    def forward(ctx: Any, place: Place, output: tuple[Tensor], *activations: Tensor) -> Tensor:
        """The output as it is; ``activations`` are what there are gradients to give on for."""
        ctx.place = place
        ctx.set_materialize_grads(False)
        if place.frame is not None:
            # To unpack it is to let the checkpoint recompute, and with it the small graph.
            ctx.save_for_backward(activations[0])
        return output[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """I."""
        (grad,), (_, _, *wanted) = grads, ctx.needs_input_grad
        found: list[Tensor | None] = [None] * len(wanted)
        if grad is not None:
            if ctx.place.frame is not None:
                _ = ctx.saved_tensors
            now: Place = ctx.place.now()
            edge = now.leave(grad)
            inputs, now.inputs = now.inputs, ()
            if now.weight is not None:
                found = [_product(grad, now.weight)] if wanted[0] else [None]
            elif inputs:
                found = _input_gradients(edge, grad, inputs, wanted)
        return (None, None, *found)


def _product(grad: Tensor, weight: Tensor) -> Tensor:
    rows = grad if grad.ndim == 2 else grad.reshape(-1, grad.shape[-1])
    return rows.mm(weight).view(*grad.shape[:-1], weight.shape[1])


def _input_gradients(
    edge: GradientEdge, grad: Tensor, inputs: tuple[Tensor, ...], wanted: list[bool]
) -> list[Tensor | None]:
    asked = tuple(each for each, is_wanted in zip(inputs, wanted, strict=True) if is_wanted)
    if not asked:
        return [None] * len(wanted)
    # Private, as in `runtime.boundary`: the checks of `torch.autograd.grad` would be made for every layer.
    found = iter(
        _engine_run_backward((edge,), (grad,), True, False, asked, allow_unreachable=True, accumulate_grad=False)
    )
    return [next(found) if is_wanted else None for is_wanted in wanted]


class Gate(torch.autograd.Function):
    """A weight on its way into a function that is not split: leaves the gradient that I finds for W."""

    @staticmethod
    def forward(ctx: Any, place: Place, weight: tuple[Tensor], _: Tensor) -> Tensor:
        """The weight as it is."""
        ctx.place = place
        ctx.set_materialize_grads(False)
        return weight[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """I."""
        if grads[0] is not None:
            ctx.place.now().leave(grads[0])
        return None, None, None


def phony(like: Tensor) -> Tensor:
    """What makes the output of a node require a gradient where none of its inputs does."""
    return torch.empty(0, device=like.device, requires_grad=True)


# Without `Function.apply`, which binds arguments and looks for torch.func's wrappers: those are not here.
split: Any = super(torch.autograd.Function, Split).apply
gate: Any = super(torch.autograd.Function, Gate).apply
