"""How the losses of micro-batches become the loss of the batch, and what seeds each backward (contract 4).

Averaging the means of micro-batches is wrong as soon as they count differently many samples or tokens (the
gradient-accumulation bug of 2024). Here the loss of a batch is a weighted mean, and the weights are what the loss
says that it counts.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeloom.batch.microbatches import MicrobatchInputs
from pipeloom.batch.model_losses import ModelLoss, is_loss, missing_loss_hint, own_loss
from pipeloom.batch.trees import flatten
from pipeloom.errors import LossError, NonFiniteLoss, PipeloomWarning

LossFn = Callable[..., Any]
Reduction = Literal["mean", "sum"]

_COUNT = "the count of micro-batch {}"


@dataclass(frozen=True)
class LossRule:
    """What the user said about the loss.

    Args:
        loss_fn: ``loss_fn(output, target)`` → a scalar, or ``(sum, count)``; None: the output is the loss, or holds it
            (`own_loss`).
        reduction: "mean": the micro-batches' losses are means, weighted by samples or by ``count``; "sum": they
            are sums and are added up.
        count: ``count(target)`` → how much a micro-batch counts, e.g. its tokens; default ``loss_fn.count``. Without
            a loss function and a target it is called with the model's ``labels``.
        model: how the model counts its own labels; asked without a loss function and ``count``.
    """

    loss_fn: LossFn | None
    reduction: Reduction = "mean"
    count: Callable[[Any], Any] | None = None
    model: ModelLoss = field(default_factory=ModelLoss)

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise LossError(f"loss_reduction={self.reduction!r} was given; 'mean' or 'sum' is needed")
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise LossError(f"loss_fn={self.loss_fn!r} was given; a function loss_fn(output, target) is needed")
        if isinstance(self.loss_fn, type) and issubclass(self.loss_fn, nn.Module):
            raise LossError(
                f"loss_fn={self.loss_fn.__name__} was given, a class; a module is needed", "put () behind it"
            )
        if self.count is not None and not callable(self.count):
            raise LossError(f"loss_count={self.count!r} was given; a function loss_count(target) is needed")

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the loss function itself learns: a module's own, or those of modules that a function finds around it."""
        held = [self.loss_fn] if isinstance(self.loss_fn, nn.Module) else _around(self.loss_fn)
        modules = [each for each in held if isinstance(each, nn.Module)]
        return [p for each in modules for p in each.parameters()] + [p for p in held if isinstance(p, nn.Parameter)]

    def called(self, output: Any, target: Any) -> Any:
        """What the loss function returns; it may take the output alone."""
        if self.loss_fn is None:
            return own_loss(output)
        is_alone = target is None or self._num_arguments[1] < 2
        return self.loss_fn(output) if is_alone else self.loss_fn(output, target)

    @cached_property
    def _num_arguments(self) -> tuple[int, float]:
        """How many the loss function needs, and how many it takes."""
        return (1, 1) if self.loss_fn is None else _num_arguments(self.loss_fn)

    def for_inputs(self, inputs: Sequence[MicrobatchInputs], scale: float) -> StepLoss:
        """The rule for one step, before its first forward, from its micro-batches; raises as `for_step`."""
        calls = [self.model.arguments(each.args, each.kwargs) for each in inputs]
        return self.for_step([each.num_samples for each in inputs], [each.target for each in inputs], scale, calls)

    def for_step(
        self, num_samples: Sequence[int], targets: Sequence[Any], scale: float, calls: Sequence[Mapping[str, Any]] = ()
    ) -> StepLoss:
        """The rule for one step, before its first forward.

        Args:
            num_samples: per micro-batch, its rows.
            targets: per micro-batch.
            scale: multiplies every gradient.
            calls: per micro-batch, the model's arguments by name.

        Raises:
            LossError: the loss function needs a target and there is none, a target brings a graph along, or what it
                counts, or ``scale``, is no number.
        """
        hint = "with a torch.amp.GradScaler: loss_scale=scaler.scale(torch.ones(()))"
        number = _number("loss_scale", scale, hint)
        if self._num_arguments[0] > 1 and any(each is None for each in targets):
            raise LossError(
                "no target was given, and the loss function needs one: loss_fn(output, target)",
                "call step(inputs, target=...)",
            )
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flatten(list(targets))[0]):
            raise LossError(
                "the target requires a gradient; a step finds those of parameters and inputs, and would drop this one",
                "pass target.detach(), or make the target under torch.no_grad()",
            )
        rule = self if self.loss_fn or not self.model.is_sum(calls) else replace(self, reduction="sum")
        counted = self._counted(targets, calls)
        return StepLoss(rule, list(num_samples), rule._counts(counted, calls, num_samples), number, counted)

    def weights(self, inputs: Sequence[MicrobatchInputs]) -> list[float]:
        """Per micro-batch, what scalars among a model's outputs weigh in their mean: its labels, else its rows."""
        num_samples = [each.num_samples for each in inputs]
        calls = [self.model.arguments(each.args, each.kwargs) for each in inputs]
        labels = self._counted([None] * len(inputs), calls)
        has_labels = self.loss_fn is None and all(each is not None for each in labels)
        counts = self._counts(labels, calls, num_samples) if has_labels else None
        return counts or [float(each) for each in num_samples]

    def _counted(self, targets: Sequence[Any], calls: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        """What is counted: the targets, or without a loss function and targets the model's labels."""
        is_own = self.loss_fn is None and bool(calls) and all(each is None for each in targets)
        return [call.get("labels") for call in calls] if is_own else targets

    def _counts(
        self, counted: Sequence[Any], calls: Sequence[Mapping[str, Any]], num_samples: Sequence[int]
    ) -> list[float] | None:
        own = getattr(self.loss_fn, "count", None)
        count = self.count or (own if callable(own) else None)
        if count is not None:
            return [_number(_COUNT.format(i), count(each)) for i, each in enumerate(counted)]
        has_model = self.loss_fn is None and self.reduction == "mean"
        return self.model.counts(calls, num_samples) if has_model else None


@dataclass(frozen=True)
class Verdict:
    """What the losses of a step come to.

    Args:
        value: the loss of the batch, a detached scalar.
        scale: what gradients are multiplied by at the end.
        fault: that the value is not finite.
    """

    value: Tensor
    scale: float
    fault: NonFiniteLoss | None


@dataclass
class StepLoss:
    """The losses of one step, one per micro-batch as they come.

    Args:
        rule: what the user said.
        num_samples: per micro-batch, its rows.
        counts: per micro-batch what it counts, where that is known before the first forward.
        scale: multiplies every gradient, not the loss (for a gradient scaler or accumulation).
        targets: per micro-batch.
    """

    rule: LossRule
    num_samples: list[int]
    counts: list[float] | None
    scale: float = 1.0
    targets: Sequence[Any] = ()
    returned_counts: dict[int, float] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_deferred(self) -> bool:
        """Counts came with the losses, so gradients are scaled once, at the end of the step.

        Known before the first backward: that needs the last stage's forward, which sets it.
        """
        return self.counts is None and self.rule.reduction == "mean" and bool(self.returned_counts)

    def compute(self, microbatch: int, output: Any, target: Any) -> Tensor:
        """The scalar to back-propagate from for one micro-batch; notes its value.

        Raises:
            LossError: what the loss function returned is no scalar and no ``(sum, count)``, or has no graph.
        """
        loss = self._scalar(microbatch, self.rule.called(output, target))
        if not loss.requires_grad:
            raise LossError(
                f"the loss of micro-batch {microbatch} does not depend on any parameter that requires a gradient, so "
                "there is nothing to train",
                "compute it without argmax(), item() or detach(), and with a parameter that is not frozen",
            )
        self.values[microbatch] = loss.detach()
        return loss

    def seed(self, microbatch: int) -> float:
        """The gradient of the batch's loss with respect to this micro-batch's."""
        return self.scale * (1.0 if self.is_deferred else self._weight(microbatch))

    @property
    def final_scale(self) -> float:
        """What gradients are multiplied by at the end of the step if `is_deferred`."""
        return _inverse(math.fsum(self.returned_counts.values()))

    def total(self) -> Tensor:
        """The loss of the batch: a detached scalar. Warns if targets are ignored and nothing says how many."""
        if self.counts is None and not self.returned_counts and self.rule.reduction == "mean":
            _warn_of_ignored(self.rule.loss_fn, self.targets)
        return self._total

    def add_up(self) -> None:
        """Work out `total`, and whether it is finite, before anybody asks; only where all losses are there.

        The rank of the last stage calls this when its own part of the step is over: it has the losses, and time.
        """
        if len(self.values) == len(self.num_samples):
            self._is_finite  # noqa: B018

    def with_loss_fn(self, loss_fn: LossFn | None) -> StepLoss:
        """The same step's, found by another loss function: a second replica's, which has weights of its own."""
        return replace(self, rule=replace(self.rule, loss_fn=loss_fn))

    @property
    def is_finite(self) -> bool:
        """Whether `total` is neither NaN nor infinite."""
        return bool(self._is_finite)

    @cached_property
    def _is_finite(self) -> Tensor:
        return torch.isfinite(self._total)

    @cached_property
    def _total(self) -> Tensor:
        if self.is_deferred:
            return self._sum([1.0] * len(self.values)) * self.final_scale
        return self._sum([self._weight(microbatch) for microbatch in sorted(self.values)])

    def verdict(self, step_index: int, *, has_check: bool = True) -> Verdict:
        """What all losses together come to, once they are all there; with ``has_check``, whether that is finite."""
        value = self.total()
        is_fine = not has_check or self.is_finite
        fault = None if is_fine else self.non_finite(step_index)
        return Verdict(value, self.final_scale if self.is_deferred else 1.0, fault)

    def non_finite(self, step_index: int) -> NonFiniteLoss:
        """The error for a total that is NaN or infinite, naming the first micro-batch that made it so."""
        counted = (i for i in sorted(self.values) if self._weight(i))
        guilty = next((i for i in counted if not bool(torch.isfinite(self.values[i]))), None)
        if self._has_nothing_counted:
            what, guilty = "no target of the whole batch counts, so the loss is 0/0", None
        elif guilty is None:
            what = f"the losses of the micro-batches are finite, but add up to {self.total().item()}"
        else:
            what = f"the loss of micro-batch {guilty} is {self.values[guilty].item()}"
        look = "" if guilty is None else "look at the inputs of that micro-batch, or "
        return NonFiniteLoss(
            f"step {step_index}: {what}; the step's gradients were dropped",
            step_index=step_index,
            microbatch=guilty or 0,
            hint=f'{look}pass on_nan="skip" to go on without such steps',
        )

    @property
    def _has_nothing_counted(self) -> bool:
        counts = self.returned_counts.values() if self.counts is None else self.counts
        return self.rule.reduction == "mean" and bool(counts) and not math.fsum(counts)

    def _sum(self, weights: Sequence[float]) -> Tensor:
        """Add up in ascending order, each share rounded as in the loop that people write."""
        losses = [self.values[i] for i in sorted(self.values)]
        parts = _equal_parts(weights)
        # A micro-batch in which nothing counts has the loss 0/0, and no part in the batch's.
        shares = [
            (loss / parts if parts else loss * weight) if weight else torch.zeros_like(loss)
            for loss, weight in zip(losses, weights, strict=True)
        ]
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        return total

    def _weight(self, microbatch: int) -> float:
        if self.rule.reduction == "sum":
            return 1.0
        if self.counts is None:
            return self.num_samples[microbatch] / sum(self.num_samples)
        total = math.fsum(self.counts)
        has_sums = bool(self.returned_counts)
        if has_sums or not total:
            return _inverse(total)
        return self.counts[microbatch] / total

    def _scalar(self, microbatch: int, returned: Any) -> Tensor:
        has_count = isinstance(returned, tuple) and len(returned) == 2
        if has_count and (self.rule.loss_fn or is_loss(returned[0])):
            returned, count = returned
            self._note_count(microbatch, _number(_COUNT.format(microbatch), count))
        elif self.returned_counts:
            raise LossError(
                f"the loss of micro-batch {microbatch} came without a count, but earlier ones came as (sum, count); "
                "all must be alike"
            )
        if not isinstance(returned, Tensor) or returned.numel() != 1:
            raise LossError(
                f"the loss of micro-batch {microbatch} is {_describe(returned)}; a scalar tensor, or a tuple "
                "(sum, count), is needed to back-propagate from",
                "reduce it with .mean(), or return (losses.sum(), count)"
                if self.rule.loss_fn
                else missing_loss_hint(returned),
            )
        return returned.reshape(()) if returned.dim() else returned

    def _note_count(self, microbatch: int, count: float) -> None:
        known = None if self.counts is None else self.counts[microbatch]
        if known is not None and known != count:
            raise LossError(
                f"micro-batch {microbatch} counts {known:g} by count(target), but its loss came with {count:g}; "
                "both must be the same number"
            )
        if self.values and not self.returned_counts:
            raise LossError(
                f"the loss of micro-batch {microbatch} came as (sum, count), but earlier ones came without a count; "
                "all must be alike"
            )
        self.returned_counts[microbatch] = count


def _equal_parts(weights: Sequence[float]) -> int | None:
    """n if all weights are 1/n: a loop then says ``loss / n``, else ``loss * weight``, which rounds differently."""
    weight = weights[0]
    parts = round(1 / weight) if weight and math.isfinite(weight) else 0
    return parts if parts and set(weights) == {1 / parts} else None


def _inverse(total: float) -> float:
    """NaN for nothing counted: the loss of an empty batch is 0/0, as in torch."""
    return 1 / total if total else math.nan


def _number(name: str, value: Any, hint: str | None = None) -> float:
    try:
        return float(value + 0)  # the text "3" is no number
    except (TypeError, ValueError, RuntimeError):
        raise LossError(f"{name} is {_describe(value)}; a number is needed", hint) from None


def _around(loss_fn: Any) -> list[Any]:
    """The variables of the scopes around a function that it uses; what a method is bound to, and its attributes."""
    if not inspect.isroutine(loss_fn) or inspect.isbuiltin(loss_fn):
        return []
    found, owner = inspect.getclosurevars(loss_fn), getattr(loss_fn, "__self__", None)
    return [*found.nonlocals.values(), *found.globals.values(), owner, *getattr(owner, "__dict__", {}).values()]


def _num_arguments(loss_fn: LossFn) -> tuple[int, float]:
    """How many positional arguments a loss function needs, and how many it takes."""
    called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature: torch.mean, torch.dist
        return 1, 2
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    num_needed = sum(p.default is p.empty for p in positional)
    is_open = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return num_needed, math.inf if is_open else len(positional)


def _warn_of_ignored(loss_fn: LossFn | None, targets: Sequence[Any]) -> None:
    ignored = getattr(loss_fn, "ignore_index", -100)
    for target in targets:
        is_classes = isinstance(target, Tensor) and not target.is_floating_point() and target.dtype != torch.bool
        if is_classes and bool((target == ignored).any()):
            warnings.warn(
                f"targets hold ignore_index ({ignored}), but a mean of each micro-batch is weighted by its samples, so "
                "micro-batches with few counted targets weigh too much; return (sum, count) from the loss, or give "
                "loss_count=lambda target: (target != ignore_index).sum()",
                PipeloomWarning,
                stacklevel=6,  # the caller of step()
            )
            return


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
