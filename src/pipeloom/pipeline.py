"""`Pipeline`: a model, cut, scheduled and run. It wires the rooms together and decides nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from pipeloom.archive.group import Group
from pipeloom.batch.losses import LossFn, LossRule, Reduction, StepLoss, Verdict
from pipeloom.batch.microbatches import MicrobatchInputs, batch_size, merge_outputs, split_batch
from pipeloom.errors import LossError, PipeloomError, ProcessError, RuntimeStateError, SplitError
from pipeloom.ir import Schedule, Timeline
from pipeloom.processes import TransportName, clip_grad_norm
from pipeloom.programs import Programs
from pipeloom.ranks import Devices, check_num_ranks, place
from pipeloom.runtime.ambient import Ambient
from pipeloom.runtime.batch_norm import DeferredStatistics
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.executor import Plan
from pipeloom.runtime.foreign_draws import ForeignDraws
from pipeloom.runtime.gradients import GradientChanges, set_grad_dtype
from pipeloom.runtime.trace import Trace
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
        transport: "auto": ranks are processes where several were started (by torchrun, or with a process group of
            your own), else threads of this one; "local" and "distributed" say it. Each process makes the whole model
            and keeps its own stages; the others' weights go to the meta device.
        wait_limit_s: how long a process waits for another before it reports a stall, in seconds.

    Raises:
        SplitError: the model cannot be cut so, or ``batch_norm`` is none that exists.
        ScheduleError: the schedule is unknown, does not fit the stages, or is wrong.
        ProcessError: ``transport`` is none that exists, or there are not as many processes as ranks.
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
        devices: Devices | None = None,
        loss_reduction: Reduction = "mean",
        loss_count: Callable[[Any], Any] | None = None,
        on_nan: OnNan = "raise",
        batch_norm: Statistics = "per-microbatch",
        grad_dtype: torch.dtype | None = None,
        seed: int = 0,
        trace: bool = True,
        transport: TransportName = "auto",
        wait_limit_s: float = 600.0,
    ) -> None:
        _one_of(transport, TransportName, "transport", ProcessError)
        self._split = split(model, num_stages=num_stages, cuts=cuts)
        self._ties = Ties(self._split, loss_fn)
        self._model = model
        self._rule = LossRule(loss_fn, loss_reduction, loss_count)
        self._on_nan = _one_of(on_nan, OnNan, "on_nan", LossError)
        is_deferred = _one_of(batch_norm, Statistics, "batch_norm", SplitError) == "deferred"
        self._programs = Programs(schedule, self.num_stages, recompute)
        self.num_microbatches = self._programs.checked(num_microbatches)
        check_num_ranks(num_ranks, self.num_ranks)
        rule, programs = self._rule, self._programs
        self._ranks = place(self._split, self._ties, programs, rule, transport, devices, wait_limit_s)
        own = nn.ModuleList(unit.module for stage in self._ranks.stages for unit in self._split.stages[stage])
        self._statistics = DeferredStatistics(own if is_deferred else nn.Module())
        if grad_dtype is not None:
            set_grad_dtype(own.parameters(), grad_dtype)
        self._foreign = ForeignDraws()
        self._user: dict[str, object] = {}
        self._is_closed = False
        self._trace: Trace | None = None
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
        if self._trace is None:
            raise RuntimeStateError("no step was traced yet", "call step() once, with trace=True (the default)")
        return self._trace.timeline()

    @property
    def peak_live_slots(self) -> tuple[int, ...]:
        """Per rank, the most receive buffers that were live at once in the last step or evaluation."""
        return self._ranks.runtime.peak_live_slots

    @property
    def group(self) -> Group:
        """The processes of this pipeline: ``rank``, ``num_ranks``, and ``all_gather(payload, what)`` of bytes."""
        return self._ranks.runtime

    @property
    def layout(self) -> dict[str, Any]:
        """How the model is laid out: counts, schedule, and per stage in this process its names in `state_dict`."""
        counts = {"num_stages": self.num_stages, "num_ranks": self.num_ranks, "schedule": self.schedule.name}
        return counts | {"stages": self._ranks.share.layout()}

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
        context = self._context(inputs, loss, (args, kwargs, target), has_outputs=return_outputs)
        plan = self._programs.training(len(inputs))
        with self._running(), self._deferring(len(inputs)), self._run(plan, context) as changes:
            outputs = self._merged(context) if return_outputs else None
            verdict = partial(loss.verdict, self.step_index, has_check=self._on_nan != "ignore")
            value = self._settle(self._ranks.runtime.agree(verdict), context, changes)
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
        inputs = split_batch(args, kwargs, None, num_microbatches)
        context = self._context(inputs, None, (args, kwargs), has_outputs=True)
        with self._running(), self._run(self._programs.evaluation(num_microbatches), context):
            self._ranks.runtime.agree(None)
            outputs = self._merged(context)
            return self._ranks.runtime.from_last(outputs) if broadcast_output else outputs

    # The model as a whole.

    def parameters(self) -> Iterator[nn.Parameter]:
        """The whole model's parameters, in its order, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the whole model's names; a list's modules are named by their index."""
        return self._ranks.share.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers under the whole model's names."""
        return self._ranks.share.state_dict()

    def full_state_dict(self, to: int = 0) -> dict[str, Any]:
        """All ranks' parts on rank ``to``, nothing on the others; where ranks are processes, all have to call it."""
        return self._ranks.share.in_order(self._ranks.runtime.to_one(self.state_dict(), to))

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load parameters and buffers by the whole model's names, as `nn.Module.load_state_dict` does."""
        return self._ranks.share.load_state_dict(state, strict)

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
        if self._ranks.share.is_whole:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
        gather = partial(
            self._ranks.runtime.all_gather,
            what=f"clip_grad_norm_({max_norm}, {norm_type}) before step {self.step_index}",
        )
        own, names = dict(self.named_parameters()), self._ranks.share.parameter_names
        return clip_grad_norm(own, names, max_norm, norm_type, error_if_nonfinite, gather)

    def optimizer(self, cls: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        """An optimizer of all parameters: ``pipe.optimizer(torch.optim.AdamW, lr=3e-4)``."""
        return cls(list(self.parameters()) or [nn.Parameter(torch.empty(0))], **options)

    def unwrap(self) -> nn.Module | Sequence[nn.Module]:
        """Give the model back, whole, and close the pipeline; waits for ranks that a failed step left busy.

        Where ranks are processes all have to call it, and each gets the whole model.
        """
        self._ranks.runtime.wait_for_late_ranks()
        if not self._ranks.share.is_whole:
            self._ranks.share.fill(self._ranks.runtime.to_all(self._ranks.share.contents()))
        self.close()
        self._ties.undo()
        return self._model

    def close(self) -> None:
        """End the rank threads. A closed pipeline runs no more; its parameters stay."""
        self._is_closed = True
        self._ranks.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._is_closed = True
        self._ranks.runtime.close_after(error if isinstance(error, Exception) else None)  # leaving early is no failure

    # How it is wired.

    def _context(
        self, inputs: list[MicrobatchInputs], loss: StepLoss | None, batch: Any, *, has_outputs: bool
    ) -> StepContext:
        ambient, seed, step_index = Ambient.capture(), self.seed, self.step_index
        return StepContext(inputs, loss, ambient, seed, step_index, self._foreign, has_outputs, batch)

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
        self._ties.refresh(self._ranks.stages)
        changes = self._ranks.runtime.run(plan, context, has_trace=self.trace)
        self._trace = self._ranks.runtime.trace or self._trace
        return changes

    def _settle(self, verdict: Verdict | None, context: StepContext, changes: GradientChanges) -> Tensor:
        """Finish the gradients, or drop them because the loss is not finite."""
        assert verdict is not None, "a training step has losses"
        if verdict.fault is None:
            context.backward_into_inputs(verdict.scale)
            changes.finish(verdict.scale)
            self._ranks.runtime.gather_ties()
            self._ties.gather(self._ranks.stages)
        elif self._on_nan == "raise":
            raise verdict.fault
        else:
            changes.undo()
            self._statistics.discard()
        return verdict.value

    def _merged(self, context: StepContext) -> Any:
        """The outputs; None on a rank that does not have the last stage."""
        if self.num_stages - 1 not in self._ranks.stages:
            return None
        outputs = [context.outputs[i] for i in range(len(context.inputs))]
        return merge_outputs(outputs, [each.num_samples for each in context.inputs])


def _one_of(given: Any, choices: Any, name: str, error: type[PipeloomError]) -> Any:
    """``given`` if it is one of the strings of a `Literal`."""
    known = get_args(choices)
    if given not in known:
        raise error(f"{name}={given!r} was given; one of {', '.join(map(repr, known))} is needed")
    return given
