"""`Pipeline`: a model, cut, scheduled and run. It wires the rooms together and decides nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from pipeloom.errors import LossError, NonFiniteLoss, RuntimeStateError, SplitError, UnsupportedShape
from pipeloom.ir import Kind, Schedule, Timeline
from pipeloom.ir.verify import require_valid
from pipeloom.passes import add_recompute, add_transfers
from pipeloom.runtime.ambient import Ambient
from pipeloom.runtime.batch_norm import DeferredStatistics
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.executor import Plan
from pipeloom.runtime.local import GradientChanges, LocalRuntime
from pipeloom.runtime.losses import LossFn, LossRule, Reduction, StepLoss
from pipeloom.runtime.microbatches import batch_size, merge_outputs, split_batch
from pipeloom.runtime.stage import Stage
from pipeloom.schedules import schedule as make_schedule
from pipeloom.schedules.forward_only import evaluation
from pipeloom.splitting import split

OnNan = Literal["raise", "skip", "ignore"]
_RUNNABLE = frozenset({Kind.FORWARD, Kind.BACKWARD})


class Pipeline:
    """A model whose stages run on ranks and pass micro-batches on.

    The model belongs to the pipeline until `unwrap` gives it back. For the same micro-batches, loss and gradients
    are those of one process that runs them in order and accumulates, to the bit (docs/numerics.md).

    Args:
        model: an `nn.Sequential`, or a list with one module per stage; each stage's output (a tensor, or a tuple or
            dict of tensors) is the next one's input.
        num_stages: how many stages a Sequential is cut into; balanced by parameters.
        schedule: a name, or a `Schedule` of F and B for exactly ``num_microbatches``.
        num_microbatches: parts that each batch is cut into; by default the schedule's, or one per stage.
        loss_fn: ``loss_fn(output, target)`` → a scalar mean, or ``(sum, count)``. None: the output is the loss.
        cuts: ``[2, 5]`` starts a new stage before children 2 and 5.
        recompute: keep only each stage's input and compute the rest again in the backward; one value, or one
            per stage.
        num_ranks: how many ranks there are; only checked against the schedule.
        devices: one device per rank; None leaves the model where it is.
        loss_reduction: "mean", or "sum": add the micro-batches' losses up.
        loss_count: ``loss_count(target)`` → how much a micro-batch counts; makes the loss the whole batch's mean.
        on_nan: what to do about a loss that is not finite: "raise", "skip" (drop the step's gradients) or "ignore".
        batch_norm: "per-microbatch", or "deferred": only the running statistics are those of the whole batch.
        seed: of all random draws inside the model.
        trace: measure when each action runs.

    Raises:
        SplitError: the model cannot be cut so.
        ScheduleError: the schedule is unknown, does not fit the stages, or is wrong.
        LossError: ``loss_fn``, ``loss_reduction`` or ``on_nan`` is none that exists.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        num_stages: int | None = None,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int | None = None,
        loss_fn: LossFn | None = None,
        cuts: Sequence[int] | None = None,
        recompute: bool | Sequence[bool] = False,
        num_ranks: int | None = None,
        devices: Sequence[torch.device | str | int] | None = None,
        loss_reduction: Reduction = "mean",
        loss_count: Callable[[Any], Any] | None = None,
        on_nan: OnNan = "raise",
        batch_norm: Literal["per-microbatch", "deferred"] = "per-microbatch",
        seed: int = 0,
        trace: bool = True,
    ) -> None:
        self._split = split(model, num_stages=num_stages, cuts=cuts)
        self._model = model
        self._schedule = schedule
        self._rule = LossRule(loss_fn, loss_reduction, loss_count)
        self._on_nan = _one_of("on_nan", on_nan, ("raise", "skip", "ignore"))
        self._statistics = _statistics(self._split.root, batch_norm)
        self._recomputed = _stages_with_recompute(recompute, self.num_stages)
        self._plans: dict[tuple[int, bool], Plan] = {}
        self._num_microbatches = _default_microbatches(schedule, num_microbatches, self.num_stages)
        plan = self._plan(self._num_microbatches, is_training=True)
        self._placement = plan.schedule.placement
        _check_ranks(num_ranks, self.num_ranks)
        self._runtime = LocalRuntime(self._make_stages(devices), self._placement)
        self._in_use = threading.Lock()
        self._is_closed = False
        self._timeline: Timeline | None = None
        self.seed = seed
        self.trace = trace
        self.step_index = 0

    # What it consists of.

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self._split.num_stages

    @property
    def num_ranks(self) -> int:
        """How many ranks run them."""
        return self._placement.num_ranks

    @property
    def num_microbatches(self) -> int:
        """Parts that each batch is cut into; may be set between steps if the schedule was given by name."""
        return self._num_microbatches

    @num_microbatches.setter
    def num_microbatches(self, count: int) -> None:
        self._plan(_default_microbatches(self._schedule, count, self.num_stages), is_training=True)
        self._num_microbatches = count

    @property
    def schedule(self) -> Schedule:
        """What a training step runs, with transfers and recomputation."""
        return self._plan(self._num_microbatches, is_training=True).schedule

    @property
    def timeline(self) -> Timeline:
        """When each action of the last traced step or evaluation ran.

        Raises:
            RuntimeStateError: nothing was traced yet.
        """
        if self._timeline is None:
            raise RuntimeStateError("no step was traced yet", "call step() once, with trace=True (the default)")
        return self._timeline

    @property
    def peak_live_slots(self) -> tuple[int, ...]:
        """Per rank, the most receive buffers that were live at once in the last step or evaluation."""
        return self._runtime.peak_live_slots

    # Running it.

    def step(
        self,
        *args: Any,
        target: Any = None,
        loss_scale: float = 1.0,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the forward and backward of every micro-batch; gradients add up in ``.grad`` as torch's do.

        Args:
            args: the model's inputs, tensors ``(batch, ...)`` on any device.
            target: the loss function's second argument, ``(batch, ...)``.
            loss_scale: multiplies the gradients, not the returned loss.
            return_outputs: also return the merged outputs of the last stage, detached.
            kwargs: keyword arguments of the model's first stage.

        Returns:
            The loss of the batch, a detached scalar; with ``return_outputs`` a pair (loss, outputs).

        Raises:
            BatchError: the batch cannot be cut into ``num_microbatches``.
            LossError: a target is missing, a loss is no scalar, or not finite (`NonFiniteLoss`).
            RuntimeStateError: the pipeline is closed or in use, or gradients are switched off.
            Exception: what a stage raised, with a note that says where. Gradients are then as before the step.
        """
        if not torch.is_grad_enabled():
            raise RuntimeStateError("step() was called with gradients switched off", "call the pipeline to evaluate")
        inputs = split_batch(args, kwargs, target, self._num_microbatches)
        loss = self._rule.for_step([each.num_samples for each in inputs], [each.target for each in inputs], loss_scale)
        context = StepContext(inputs, loss, Ambient.capture(), self.seed, self.step_index, return_outputs)
        with self._running():
            self._statistics.begin()
            changes = self._run(self._plan(self._num_microbatches, is_training=True), context)
            self._statistics.commit()
            value = self._settle(loss, changes)
        self.step_index += 1
        return (value, self._merged(context)) if return_outputs else value

    def __call__(self, *args: Any, broadcast_output: bool = False, **kwargs: Any) -> Any:
        """Evaluate: the forward of every micro-batch, without gradients; any batch size.

        Args:
            args: the model's inputs, tensors ``(batch, ...)``.
            broadcast_output: where ranks are processes, give every rank the output; here the caller has it anyway.
            kwargs: keyword arguments of the model's first stage.

        Returns:
            The outputs of the last stage, merged: tensors with the batch's rows are concatenated, scalars averaged
            by rows, other values must be equal.

        Raises:
            BatchError: there is no batch to cut, or outputs cannot be merged.
            RuntimeStateError: the pipeline is closed or in use.
        """
        num_microbatches = min(self._num_microbatches, max(1, batch_size(args, kwargs)))
        inputs = split_batch(args, kwargs, None, num_microbatches)
        context = StepContext(inputs, None, Ambient.capture(), self.seed, self.step_index, True)
        with self._running():
            self._run(self._plan(num_microbatches, is_training=False), context)
        return self._merged(context)

    # The model as a whole.

    def parameters(self) -> Iterator[nn.Parameter]:
        """The whole model's parameters, in its order, each once."""
        return self._split.root.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the whole model's names; a list's modules are named by their index."""
        return self._split.root.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers under the whole model's names."""
        return self._split.root.state_dict()

    def full_state_dict(self, to: int = 0) -> dict[str, Any]:
        """All ranks' parts; they are all in this process, so it is `state_dict`, whatever ``to`` is."""
        del to
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load parameters and buffers by the whole model's names, as `nn.Module.load_state_dict` does."""
        return self._split.root.load_state_dict(state, strict=strict)

    def train(self, mode: bool = True) -> Self:
        """Put the model into training mode."""
        self._split.root.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self._split.root.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most ``max_norm``; return the norm before."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)

    def optimizer(self, cls: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        """An optimizer of all parameters: ``pipe.optimizer(torch.optim.AdamW, lr=3e-4)``."""
        return cls(self.parameters(), **options)

    def unwrap(self) -> nn.Module | Sequence[nn.Module]:
        """Give the model back, whole, and close the pipeline."""
        self.close()
        return self._model

    def close(self) -> None:
        """End the rank threads. A closed pipeline runs no more; its parameters stay."""
        self._is_closed = True
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # How it is wired.

    def _plan(self, num_microbatches: int, *, is_training: bool) -> Plan:
        key = (num_microbatches, is_training)
        if key not in self._plans:
            made = self._training_schedule(num_microbatches) if is_training else self._evaluation(num_microbatches)
            self._plans[key] = Plan(require_valid(add_transfers(made)))
        return self._plans[key]

    def _evaluation(self, num_microbatches: int) -> Schedule:
        return evaluation(self._placement, num_microbatches)

    def _training_schedule(self, num_microbatches: int) -> Schedule:
        made = self._schedule
        if not isinstance(made, Schedule):
            made = make_schedule(made, num_ranks=self.num_stages, num_microbatches=num_microbatches)
        _check_runnable(made, self.num_stages)
        return add_recompute(require_valid(made), self._recomputed)

    def _make_stages(self, devices: Sequence[torch.device | str | int] | None) -> list[Stage]:
        if devices is not None and len(devices) != self.num_ranks:
            raise UnsupportedShape(f"{len(devices)} devices were given for {self.num_ranks} ranks; each needs one")
        return [
            Stage(
                index,
                units,
                is_first=index == 0,
                device=None if devices is None else torch.device(devices[self._placement.rank_of(index)]),
                has_recompute=index in self._recomputed,
            )
            for index, units in enumerate(self._split.stages)
        ]

    @contextmanager
    def _running(self) -> Iterator[None]:
        if self._is_closed:
            raise RuntimeStateError("the pipeline is closed", "make a new one from the model")
        if not self._in_use.acquire(blocking=False):
            raise RuntimeStateError("the pipeline is running a step already, in this or another thread")
        try:
            yield
        finally:
            self._in_use.release()

    def _run(self, plan: Plan, context: StepContext) -> GradientChanges:
        timeline, changes = self._runtime.run(plan, context, has_trace=self.trace)
        self._timeline = timeline or self._timeline
        return changes

    def _settle(self, loss: StepLoss, changes: GradientChanges) -> Tensor:
        """Finish the gradients, or drop them because the loss is not finite."""
        value = loss.total()
        if self._on_nan == "ignore" or bool(torch.isfinite(value)):
            changes.finish(loss.final_scale if loss.is_deferred else 1.0)
            return value
        changes.undo()
        if self._on_nan == "raise":
            raise _non_finite(loss, value, self.step_index)
        return value

    def _merged(self, context: StepContext) -> Any:
        outputs = [context.outputs[i] for i in range(len(context.inputs))]
        return merge_outputs(outputs, [each.num_samples for each in context.inputs])


def _non_finite(loss: StepLoss, value: Tensor, step_index: int) -> NonFiniteLoss:
    microbatch = loss.first_non_finite()
    what = f"its loss is {value.item()}: no target counts" if microbatch is None else None
    what = what or f"the loss of micro-batch {microbatch} is {loss.values[microbatch or 0].item()}"
    return NonFiniteLoss(
        f"step {step_index}: {what}; the step's gradients were dropped",
        step_index=step_index,
        microbatch=microbatch or 0,
        hint='look at the inputs of that micro-batch, or pass on_nan="skip" to go on without such steps',
    )


def _one_of(name: str, given: Any, known: tuple[str, ...]) -> Any:
    if given not in known:
        raise LossError(f"{name}={given!r} was given; one of {', '.join(map(repr, known))} is needed")
    return given


def _statistics(root: nn.Module, batch_norm: str) -> DeferredStatistics:
    if batch_norm not in ("per-microbatch", "deferred"):
        raise SplitError(f"batch_norm={batch_norm!r} was given; 'per-microbatch' or 'deferred' is needed")
    return DeferredStatistics(root if batch_norm == "deferred" else nn.Module())


def _stages_with_recompute(recompute: bool | Sequence[bool], num_stages: int) -> frozenset[int]:
    flags = [recompute] * num_stages if isinstance(recompute, bool) else list(recompute)
    if len(flags) != num_stages:
        raise SplitError(f"recompute={flags} has {len(flags)} values for {num_stages} stages; give one for each")
    return frozenset(stage for stage, has_recompute in enumerate(flags) if has_recompute)


def _default_microbatches(schedule: str | Schedule, given: int | None, num_stages: int) -> int:
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise UnsupportedShape(f"num_microbatches={given!r} was given; a whole number of at least 1 is needed")
    if not isinstance(schedule, Schedule):
        return given or num_stages
    if given not in (None, schedule.num_microbatches):
        raise UnsupportedShape(
            f"num_microbatches={given} was given with a schedule of {schedule.num_microbatches} micro-batches",
            "leave num_microbatches out, or give the schedule by its name",
        )
    return schedule.num_microbatches


def _check_runnable(schedule: Schedule, num_stages: int) -> None:
    if schedule.num_stages != num_stages:
        raise UnsupportedShape(f"the schedule is for {schedule.num_stages} stages; the model has {num_stages}")
    other = next((action for action in schedule if action.kind not in _RUNNABLE), None)
    if other is not None or schedule.is_forward_only:
        raise UnsupportedShape(
            f"the schedule {'has forwards only' if other is None else f'holds {other}'}; a training step runs "
            "schedules of F and B, and adds recomputation and transfers itself"
        )


def _check_ranks(given: int | None, num_ranks: int) -> None:
    if given is not None and given != num_ranks:
        raise UnsupportedShape(
            f"num_ranks={given} was given, but the schedule puts the stages on {num_ranks} ranks",
            "leave num_ranks out, or give as many stages as ranks",
        )
