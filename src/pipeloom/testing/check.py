"""Does this model pipeline? One step through a pipeline, one without, and what is to be said of the cut.

Trying it in a training script answers with a loss that looks plausible either way. Here every gradient is compared, the
boundaries are weighed, and the stages are timed, before anybody rents a second device.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.batch.microbatches import batch_size, split_batch
from pipeloom.batch.trees import flatten
from pipeloom.cost import Costs
from pipeloom.errors import LossError, NonFiniteLoss, ParityError, PipeloomWarning
from pipeloom.ir import Kind, Timeline
from pipeloom.outline.description import split
from pipeloom.outline.outline import Outline
from pipeloom.parity import Comparison
from pipeloom.pipeline import Pipeline
from pipeloom.programs import Programs
from pipeloom.sim import simulate
from pipeloom.splitting import Cuts, asked
from pipeloom.testing.boundaries import bytes_at

_DEFAULT_MICROBATCHES = 4
_PATIENCE_S = 30.0
"""A first step that took longer is the one whose times are told; else a second one is, which has nothing to set up."""

Model = nn.Module | Sequence[nn.Module]


@dataclass(frozen=True)
class Check:
    """What came out.

    Args:
        comparison: of the loss and every gradient.
        outline: how the model is cut, with what crosses for one micro-batch.
        timeline: of one step, measured.
        predicted: the same schedule with the measured times of its stages, each rank on a device of its own.
        rows: of the batch.
        num_microbatches: that it was cut into.
        has_own_loss: whether the model computes a loss; else it was the mean of the squares of its outputs.
        bytes_at: what a cut before each call of a unit would carry, for one micro-batch; () if nobody knows.
        warnings: what Pipeloom warned of during the step.
    """

    comparison: Comparison
    outline: Outline
    timeline: Timeline
    predicted: Timeline
    rows: int
    num_microbatches: int
    has_own_loss: bool
    bytes_at: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether the pipeline computes what the model computes."""
        return not self.comparison.wrong

    @property
    def stage_s(self) -> list[float]:
        """Per stage, seconds of the forward and backward of one micro-batch."""
        costs = costs_of(self.timeline)
        return [sum(each) for each in zip(costs.forward_s, costs.input_grad_s, costs.weight_grad_s, strict=True)]


def check(
    model: Model,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_stages: int | None = None,
    cuts: Cuts | None = None,
    schedule: str = "1f1b",
    num_microbatches: int | None = None,
    device: torch.device | None = None,
    seed: int = 0,
) -> Check:
    """Run one step of a model through a pipeline and one without, in this process.

    Args:
        model: as the pipeline's, in the mode to check it in. Its gradients and BatchNorm statistics change.
        args: a batch.
        kwargs: likewise.
        num_stages: as the pipeline's.
        cuts: as the pipeline's.
        schedule: by name.
        num_microbatches: by default 4, or as many as there are rows.
        device: where all of it runs; None: where the model is.
        seed: of random draws in the model.

    Raises:
        PipeloomError: the model cannot be cut, or be trained; or the arguments do not fit.
    """
    args, kwargs, cuts = tuple(args), dict(kwargs or {}), asked(cuts)
    rows = batch_size(args, kwargs)
    num_microbatches = num_microbatches or min(_DEFAULT_MICROBATCHES, rows)
    first = split_batch(args, kwargs, None, num_microbatches)[0]
    outline = split(model, first.args, first.kwargs, num_stages=num_stages, cuts=cuts)
    options = {"schedule": schedule, "num_microbatches": num_microbatches, "seed": seed, "num_stages": num_stages}
    num_ranks = Programs(schedule, outline.num_stages, recompute=False).placement.num_ranks
    options |= {"cuts": cuts, "devices": device and [device] * num_ranks}
    try:
        run = _Run.of(model, args, kwargs, options, loss_fn=None)
    except NonFiniteLoss:
        raise
    except LossError:
        run = _Run.of(model, args, kwargs, options, loss_fn=mean_of_squares)
    predicted = simulate(run.timeline.schedule, costs_of(run.timeline))
    sizes = bytes_at(model, (first.args, first.kwargs), outline.num_stages, cuts)
    told = tuple(run.warnings)
    return Check(
        run.comparison, outline, run.timeline, predicted, rows, num_microbatches, run.has_own_loss, sizes, told
    )


def mean_of_squares(output: Any) -> Tensor:
    """A loss for a model that computes none: every output that can be trained takes part in it.

    Raises:
        LossError: there is none.
    """
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise LossError(
            "no output of the model depends on a parameter that requires a gradient; nothing can be trained"
        )
    return torch.stack([leaf.abs().float().square().mean().to(leaves[0].device) for leaf in leaves]).sum()


def costs_of(timeline: Timeline) -> Costs:
    """What the forward and the backward of one micro-batch took on each stage; a whole backward counts as I.

    Where some micro-batches of a stage have a whole backward and others two halves, it is the halves that count.
    """
    num_stages = timeline.schedule.num_stages
    seconds: dict[tuple[Kind, int], list[float]] = {}
    for span in timeline:
        seconds.setdefault((span.action.kind, span.action.stage), []).append(span.duration_s)

    def mean(kind: Kind, stage: int) -> float:
        found = seconds.get((kind, stage), [0.0])
        return sum(found) / len(found)

    forward_s = [mean(Kind.FORWARD, stage) for stage in range(num_stages)]
    input_grad_s = [mean(Kind.INPUT_GRAD, stage) or mean(Kind.BACKWARD, stage) for stage in range(num_stages)]
    weight_grad_s = [mean(Kind.WEIGHT_GRAD, stage) for stage in range(num_stages)]
    return Costs.uniform(num_stages, forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s)


@dataclass
class _Run:
    comparison: Comparison
    timeline: Timeline
    has_own_loss: bool
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: Model, args: Any, kwargs: Any, options: dict[str, Any], *, loss_fn: Any) -> _Run:
        pipe = Pipeline(model, loss_fn=loss_fn, verify=True, transport="local", **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PipeloomWarning)
            try:
                start_s = time.perf_counter()
                comparison = _first_step(pipe, args, kwargs)
                if time.perf_counter() - start_s < _PATIENCE_S:
                    pipe.step(*args, **kwargs)
                timeline = pipe.timeline
            finally:
                pipe.unwrap()
        told = dict.fromkeys(str(each.message) for each in caught if issubclass(each.category, PipeloomWarning))
        _show([each for each in caught if not issubclass(each.category, PipeloomWarning)])
        return cls(comparison, timeline, loss_fn is None, list(told))


def _first_step(pipe: Pipeline, args: Any, kwargs: Any) -> Comparison:
    try:
        pipe.step(*args, **kwargs)
    except ParityError as error:
        found: Comparison = error.comparison
        return found
    comparison = pipe.first_step.comparison
    assert comparison is not None, "on one device and in one process the first step is always compared"
    return comparison


def _show(others: Sequence[warnings.WarningMessage]) -> None:
    """Warnings of others are theirs to give."""
    for each in others:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
