"""`Pipeline`: a model, cut, scheduled and run. It wires the rooms together and decides nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from pipeloom.batch.losses import LossFn, LossRule, Reduction, StepLoss
from pipeloom.batch.microbatches import MicrobatchInputs, batch_size, merge_outputs, split_batch
from pipeloom.errors import LossError, PipeloomError, RuntimeStateError, SplitError, UnsupportedShape
from pipeloom.ir import Schedule, Timeline
from pipeloom.programs import Programs
from pipeloom.runtime.ambient import Ambient
from pipeloom.runtime.batch_norm import DeferredStatistics
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.executor import Plan
from pipeloom.runtime.foreign_draws import ForeignDraws
from pipeloom.runtime.gradients import GradientChanges, set_grad_dtype
from pipeloom.runtime.local import LocalRuntime
from pipeloom.runtime.stage import Stage
from pipeloom.splitting import Ties, split

OnNan = Literal["raise", "skip", "ignore"]
Statistics = Literal["per-microbatch", "deferred"]


class Pipeline:
    """A model whose stages run on ranks and pass micro-batches on.

    The model belongs to the pipeline until `unwrap` gives it back. For the same micro-batches, loss and gradients
    are those of one process that runs them in order and accumulates, to the bit (docs/numerics.md).

    Args:
        model: an `nn.Sequential`, or a list with one module per stage; each stage's output (a tensor, or a tuple or
            dict of tensors) is the next one's input. A module of a list whose forward takes several arguments gets
            a tuple, or a dict with their names, unpacked.
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
        grad_dtype: accumulate gradients in it, as `torch.float32` for parameters in bfloat16; None: in the
            parameter's own. Stays with the parameters, and the optimizer has to take such gradients.
        seed: of all random draws inside the model.
        trace: measure when each action runs.

    Raises:
        SplitError: the model cannot be cut so, or ``batch_norm`` is none that exists.
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
        batch_norm: Statistics = "per-microbatch",
        grad_dtype: torch.dtype | None = None,
        seed: int = 0,
        trace: bool = True,
    ) -> None:
        self._split = split(model, num_stages=num_stages, cuts=cuts)
        self._ties = Ties(self._split, loss_fn)
        self._model = model
        self._rule = LossRule(loss_fn, loss_reduction, loss_count)
        self._on_nan = _one_of(on_nan, OnNan, "on_nan", LossError)
        is_deferred = _one_of(batch_norm, Statistics, "batch_norm", SplitError) == "deferred"
        self._statistics = DeferredStatistics(self._split.root if is_deferred else nn.Module())
        self._programs = Programs(schedule, self.num_stages, recompute)
        self.num_microbatches = self._programs.checked(num_microbatches)
        _check_ranks(num_ranks, self.num_ranks)
        self._runtime = LocalRuntime(self._make_stages(devices), self._programs.placement)
        if grad_dtype is not None:
            set_grad_dtype(self._split.root.parameters(), grad_dtype)
        self._foreign = ForeignDraws()
        self._user: dict[str, object] = {}
        self._is_closed = False
        self._timeline: Timeline | None = None
        self.seed = seed
        self.trace = trace
        self.step_index = 0

    def __repr__(self) -> str:
        counts = f"num_stages={self.num_stages}, num_ranks={self.num_ranks}, num_microbatches={self.num_microbatches}"
        return f"Pipeline({self.schedule.name!r}, {counts})"

    # What it consists of.

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self._split.num_stages

    @property
    def num_ranks(self) -> int:
        """How many ranks run them."""
        return self._programs.placement.num_ranks

    @property
    def num_microbatches(self) -> int:
        """Parts that each batch is cut into; may be set between steps if the schedule was given by name."""
        return self._num_microbatches

    @num_microbatches.setter
    def num_microbatches(self, count: int) -> None:
        checked = self._programs.checked(count)
        self._programs.training(checked)
        self._num_microbatches = checked

    @property
    def schedule(self) -> Schedule:
        """What a training step runs, with transfers and recomputation."""
        return self._programs.training(self._num_microbatches).schedule

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
            args: the model's inputs, tensors ``(batch, ...)`` on any device; those that require a gradient get it,
                once for the whole batch.
            target: the loss function's second argument, ``(batch, ...)``.
            loss_scale: multiplies the gradients, not the returned loss.
            return_outputs: also return the merged outputs of the last stage, detached.
            kwargs: keyword arguments of the model's first stage.

        Returns:
            The loss of the batch, a detached scalar; with ``return_outputs`` a pair (loss, outputs).

        Raises:
            BatchError: the batch cannot be cut into ``num_microbatches``.
            LossError: a target is missing or brings a graph, a loss is no scalar, depends on no parameter, or is not
                finite (`NonFiniteLoss`).
            RuntimeStateError: the pipeline is closed or in use, its model changed, or gradients are switched off.
            Exception: what a stage raised, with a note that says where. Gradients are then as before the step.
        """
        if not torch.is_grad_enabled():
            raise RuntimeStateError("step() was called with gradients switched off", "call the pipeline to evaluate")
        inputs = split_batch(args, kwargs, target, self._num_microbatches)
        loss = self._rule.for_step([each.num_samples for each in inputs], [each.target for each in inputs], loss_scale)
        context = self._context(inputs, loss, has_outputs=return_outputs)
        plan = self._programs.training(len(inputs))
        with self._running(), self._deferring(len(inputs)), self._run(plan, context) as changes:
            outputs = self._merged(context) if return_outputs else None
            value = self._settle(loss, context, changes)
        self.step_index += 1
        return (value, outputs) if return_outputs else value

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
        del broadcast_output
        inputs = split_batch(args, kwargs, None, num_microbatches)
        context = self._context(inputs, None, has_outputs=True)
        with self._running():
            self._run(self._programs.evaluation(num_microbatches), context)
        return self._merged(context)

    # The model as a whole.

    def parameters(self) -> Iterator[nn.Parameter]:
        """The whole model's parameters, in its order, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the whole model's names; a list's modules are named by their index."""
        named = self._split.root.named_parameters()
        return ((name, parameter) for name, parameter in named if not self._ties.is_copy(parameter))

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
        """Give the model back, whole, and close the pipeline; waits for ranks that a failed step left busy."""
        self._runtime.wait_for_late_ranks()
        self.close()
        self._ties.undo()
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

    def _make_stages(self, devices: Sequence[torch.device | str | int] | None) -> list[Stage]:
        places = None if devices is None else _devices(devices, self.num_ranks)
        return [
            Stage(
                index,
                units,
                device=None if places is None else places[self._programs.placement.rank_of(index)],
                has_recompute=index in self._programs.recomputed,
            )
            for index, units in enumerate(self._split.stages)
        ]

    def _context(self, inputs: list[MicrobatchInputs], loss: StepLoss | None, *, has_outputs: bool) -> StepContext:
        return StepContext(inputs, loss, Ambient.capture(), self.seed, self.step_index, self._foreign, has_outputs)

    @contextmanager
    def _deferring(self, num_microbatches: int) -> Iterator[None]:
        """Update deferred running statistics once, if the step succeeds."""
        self._statistics.begin(num_microbatches)
        try:
            yield
        except BaseException:
            self._statistics.discard()
            raise
        self._statistics.commit()

    @contextmanager
    def _running(self) -> Iterator[None]:
        if self._is_closed:
            raise RuntimeStateError("the pipeline is closed", "make a new one from the model")
        me, is_grad = object(), torch.is_grad_enabled()
        try:  # Ctrl-C may fall after any call: a lock would stay locked if it fell between acquire() and this line
            if self._user.setdefault("runs", me) is not me:
                raise RuntimeStateError(
                    "the pipeline is running a step already, in this or another thread",
                    "wait until it returns; threads that train at the same time need a pipeline each",
                )
            with self._foreign.step():
                yield
        except BaseException:
            torch.set_grad_enabled(is_grad)  # Ctrl-C may fall inside a no_grad() while it puts the mode back
            raise
        finally:
            if "runs" in self._user and self._user["runs"] is me:  # no call, so nothing between this and the next line
                del self._user["runs"]

    def _run(self, plan: Plan, context: StepContext) -> GradientChanges:
        self._split.check_unchanged()
        self._ties.refresh()
        timeline, changes = self._runtime.run(plan, context, has_trace=self.trace)
        self._timeline = timeline or self._timeline
        return changes

    def _settle(self, loss: StepLoss, context: StepContext, changes: GradientChanges) -> Tensor:
        """Finish the gradients, or drop them because the loss is not finite."""
        value = loss.total()
        if self._on_nan == "ignore" or bool(torch.isfinite(value)):
            scale = loss.final_scale if loss.is_deferred else 1.0
            context.backward_into_inputs(scale)
            changes.finish(scale)
            self._ties.gather()
        elif self._on_nan == "raise":
            raise loss.non_finite(self.step_index)
        else:
            changes.undo()
            self._statistics.discard()
        return value

    def _merged(self, context: StepContext) -> Any:
        outputs = [context.outputs[i] for i in range(len(context.inputs))]
        return merge_outputs(outputs, [each.num_samples for each in context.inputs])


def _one_of(given: Any, choices: Any, name: str, error: type[PipeloomError]) -> Any:
    """``given`` if it is one of the strings of a `Literal`."""
    known = get_args(choices)
    if given not in known:
        raise error(f"{name}={given!r} was given; one of {', '.join(map(repr, known))} is needed")
    return given


def _devices(given: Sequence[torch.device | str | int], num_ranks: int) -> list[torch.device]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UnsupportedShape(f"devices={given!r} was given; a list with one device for each rank is needed")
    if len(given) != num_ranks:
        raise UnsupportedShape(f"{len(given)} devices were given for {num_ranks} ranks; each needs one")
    try:
        return [torch.device(each) for each in given]
    except (RuntimeError, TypeError):
        raise UnsupportedShape(
            f"devices={list(given)} were given; each must be a torch.device, or what makes one, as 'cuda:0'"
        ) from None


def _check_ranks(given: int | None, num_ranks: int) -> None:
    if given is not None and given != num_ranks:
        raise UnsupportedShape(
            f"num_ranks={given} was given, but the schedule puts the stages on {num_ranks} ranks",
            "leave num_ranks out, or give as many stages as ranks",
        )
