"""`Pipeline`: a model, cut, scheduled and run. It wires the rooms together and decides nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from pipeloom.archive.group import Group
from pipeloom.assembly import Assembly, Recipe, joined, links_of, made_by
from pipeloom.asynchronous import Streaming
from pipeloom.batch.caches import without_cache
from pipeloom.batch.losses import LossFn, LossRule, Reduction, StepLoss, Verdict
from pipeloom.batch.microbatches import MicrobatchInputs, batch_size, merge_outputs, split_batch
from pipeloom.batch.model_losses import ModelLoss
from pipeloom.errors import LossError, ProcessError, RuntimeStateError, SplitError, one_of
from pipeloom.ir import Links, Schedule, Timeline
from pipeloom.parity import FirstStep
from pipeloom.processes import DistributedRuntime, TransportName
from pipeloom.programs import Programs, Recompute
from pipeloom.ranks import Devices, check_num_ranks
from pipeloom.runtime.ambient import Ambient
from pipeloom.runtime.context import StepContext
from pipeloom.runtime.executor import Plan
from pipeloom.runtime.foreign_draws import ForeignDraws
from pipeloom.runtime.gradients import GradientChanges
from pipeloom.runtime.local import LocalRuntime
from pipeloom.runtime.pairs import OverlapFn
from pipeloom.runtime.trace import Trace
from pipeloom.splitting import Cuts, Inputs, Share, asked, check_count, needs_inputs, split
from pipeloom.whole import WholeModel

OnNan = Literal["raise", "skip", "ignore"]
Statistics = Literal["per-microbatch", "deferred"]


class Pipeline(Streaming, WholeModel):
    """A model whose stages run on ranks and pass micro-batches on.

    The model belongs to the pipeline until `unwrap` gives it back. For the same micro-batches, loss and gradients
    are those of one process that runs them in order and accumulates, to the bit (docs/numerics.md).

    Args:
        model: any module, which is cut by running it; an `nn.Sequential`, which is cut between its children; or a list
            with one module per stage, each one's output (a tensor, or a tuple or dict of tensors) the next one's
            input. A module of a list whose forward takes several arguments gets a tuple, or a dict with their names,
            unpacked.
        num_stages: how many stages; balanced by parameters, and by FLOPs where the model is run.
        schedule: a name, or a `Schedule` of F and B for exactly ``num_microbatches``.
        num_microbatches: parts that each batch is cut into; by default the schedule's, or one per stage.
        loss_fn: ``loss_fn(output, target)`` → a scalar mean, or ``(sum, count)``. None: the output is it, or has it.
        cuts: ``[2, 5]`` starts a new stage before children, or calls of units, 2 and 5; names of modules
            (``["model.layers.12"]``) before these; as many numbers as stages are their sizes. None or "auto" balances.
        recompute: keep a stage's input only and compute the rest again in the backward; one value, or one per stage.
            Or names of modules (``"model.layers.*.mlp"``, a list of them) whose activations alone are dropped.
        overlap: ``overlap(forward, backward)`` gets two calls and runs each once: a pair of a schedule that has such
            (dualpipe-v). None: one after the other, and what the first made is sent before the second begins.
        receive_slots: receive buffers of a rank; receives are posted as early as they allow. None: as late as possible.
        num_ranks: how many ranks there are; only checked against the schedule.
        devices: one device per rank; None leaves the model where it is.
        loss_reduction: "mean", or "sum": add the micro-batches' losses up.
        loss_count: ``loss_count(target)``, or of ``labels`` → how much a micro-batch counts, so that it weighs by it.
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
        example_args: inputs of one micro-batch, by which a model that is no Sequential is cut at once; else it is cut
            by those of the first step. Only their shapes and types matter.
        example_kwargs: likewise.
        verify: hold the first step's loss and gradients against an un-pipelined run of the model, which has to fit on
            one device; ``first_step.comparison`` has what came out. Hooks of the model run in both.
        factory: instead of ``model``, a function that makes it; with ``weights`` its parameters are never allocated.
        weights: a safetensors file, a folder with one, or a Hugging Face index, from which each process reads the
            parameters of its own stages.

    Raises:
        SplitError: the model cannot be cut so, or ``batch_norm`` is none that exists.
        ScheduleError: the schedule is unknown, does not fit the stages, or is wrong.
        ProcessError: ``transport`` is none that exists, or there are not as many processes as ranks.
        LossError: ``loss_fn``, ``loss_reduction`` or ``on_nan`` is none that exists.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        *,
        num_stages: int | None = None,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int | None = None,
        loss_fn: LossFn | None = None,
        cuts: Cuts | None = None,
        recompute: Recompute = False,
        overlap: OverlapFn | None = None,
        receive_slots: int | None = None,
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
        example_args: Sequence[Any] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        verify: bool = False,
        factory: Callable[[], nn.Module] | None = None,
        weights: str | Path | None = None,
    ) -> None:
        with joined(transport, wait_limit_s) as company:
            one_of(transport, get_args(TransportName), "transport", ProcessError)
            check_count(num_stages)
            model, cuts = made_by(model, factory, weights), asked(cuts)
            self._rule = LossRule(loss_fn, loss_reduction, loss_count, ModelLoss.of(model))
            self._model, self._on_nan = model, one_of(on_nan, get_args(OnNan), "on_nan", LossError)
            is_deferred = one_of(batch_norm, get_args(Statistics), "batch_norm", SplitError) == "deferred"
            made = None if needs_inputs(model, num_stages, cuts) else split(model, num_stages=num_stages, cuts=cuts)
            count = (num_stages or len(cuts or ()) + 1) if made is None else made.num_stages
            self._programs = Programs(schedule, count, recompute, num_ranks, overlap, receive_slots)
            self.num_microbatches = self._programs.checked(num_microbatches)
            check_num_ranks(num_ranks, self.num_ranks)
            self._recipe = Recipe(
                model, num_stages, cuts, self._programs, self._rule, company, devices, is_deferred, grad_dtype, weights
            )  # fmt: skip
            self._links = Links()
            self._built: Assembly | None = None if made is None else self._recipe.assembled(made)
            self._is_closed = False
            self._foreign = ForeignDraws()
            self._user: dict[str, object] = {}
            self._trace: Trace | None = None
            self.first_step = FirstStep(verify)
            self.seed, self.trace, self.step_index = seed, trace, 0
            args, kwargs = self._recipe.example(tuple(example_args), dict(example_kwargs or {}))
            if args or kwargs:
                self._assemble((args, without_cache(model, args, kwargs)))

    def __repr__(self) -> str:
        counts = f"num_stages={self.num_stages}, num_ranks={self.num_ranks}, num_microbatches={self.num_microbatches}"
        return f"Pipeline({self.schedule.name!r}, {counts})"

    # What it consists of.

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self._programs.placement.num_stages

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
        return self._programs.training(self._num_microbatches, self._links).schedule

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
        return self._runtime.peak_live_slots

    @property
    def group(self) -> Group:
        """The processes of this pipeline: ``rank``, ``num_ranks``, and ``all_gather(payload, what)`` of bytes."""
        return self._runtime

    @property
    def layout(self) -> dict[str, Any]:
        """How the model is laid out: counts, schedule, and per stage in this process its names in `state_dict`."""
        counts = {"num_stages": self.num_stages, "num_ranks": self.num_ranks, "schedule": self.schedule.name}
        return counts | {"stages": self._share.layout()}

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
            ParityError: with ``verify``, it computes something else than the model.
            LossError: a target is missing or brings a graph, a loss is no scalar, depends on no parameter, or is not
                finite (`NonFiniteLoss`).
            RuntimeStateError: the pipeline is closed or in use, its model changed, or gradients are switched off.
            Exception: what a stage raised, with a note that says where. Gradients are then as before the step.
        """
        self._check_steps()
        if not torch.is_grad_enabled():
            raise RuntimeStateError("step() was called with gradients switched off", "call the pipeline to evaluate")
        with self._running():
            inputs = split_batch(args, without_cache(self._model, args, kwargs), target, self._num_microbatches)
            loss = self._rule.for_inputs(inputs, loss_scale)
            context = self._context(inputs, loss, (args, kwargs, target), has_outputs=return_outputs)
            self._links = links_of(context.plans)
            plan = self._programs.training(len(inputs), self._links)
            checking = self.first_step.checking(self._assembled, context, plan.schedule)
            with checking, self._assembled.statistics.during(len(inputs)), self._run(plan, context) as changes:
                outputs = self._merged(context) if return_outputs else None
                verdict = partial(loss.verdict, self.step_index, has_check=self._on_nan != "ignore")
                value = self._settle(self._runtime.agree(verdict), context, changes)
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
        with self._running():
            inputs = split_batch(args, without_cache(self._model, args, kwargs), None, num_microbatches)
            context = self._context(inputs, None, (args, kwargs), has_outputs=True)
            plan = self._programs.evaluation(num_microbatches, links_of(context.plans))
            with self._run(plan, context):
                self._runtime.agree(None)
                outputs = self._merged(context)
                return self._runtime.from_last(outputs) if broadcast_output else outputs

    def unwrap(self) -> nn.Module | Sequence[nn.Module]:
        """Give the model back, whole, and close the pipeline; waits for ranks that a failed step left busy.

        Where ranks are processes all have to call it, and each gets the whole model.
        """
        self._is_closed = True
        self._recipe.take_apart(self._built)
        return self._model

    def close(self) -> None:
        """End the rank threads. A closed pipeline runs no more; its parameters stay."""
        self._is_closed = True
        self._recipe.close(self._built)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._is_closed = True
        self._recipe.close(self._built, error if isinstance(error, Exception) else None)  # leaving early is no failure

    # How it is wired.

    @property
    def _assembled(self) -> Assembly:
        if self._built is None:
            raise RuntimeStateError(
                "the model is cut by running it, and no inputs are known yet",
                "pass example_args= or example_kwargs= to the pipeline, or call step() first",
            )
        return self._built

    @property
    def _runtime(self) -> LocalRuntime | DistributedRuntime:
        return self._assembled.ranks.runtime

    @property
    def _share(self) -> Share:
        return self._recipe.whole() if self._built is None else self._built.ranks.share

    @property
    def _root(self) -> nn.Module:
        model = self._model if self._built is None else self._built.split.root
        assert isinstance(model, nn.Module), "a list is cut at once"
        return model

    def _assemble(self, inputs: Inputs) -> None:
        if self._built is None:
            self._built = self._recipe.assembled(inputs)

    def _context(
        self, inputs: list[MicrobatchInputs], loss: StepLoss | None, batch: Any, *, has_outputs: bool
    ) -> StepContext:
        ambient, seed, step_index = Ambient.capture(), self.seed, self.step_index
        context = StepContext(inputs, loss, ambient, seed, step_index, self._foreign, has_outputs, batch)
        given = [(each.args, each.kwargs) for each in inputs]
        self._assemble(given[0])
        context.plans[:] = self._assembled.plans(given, context.draws, is_training=loss is not None)
        return context

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
        except BaseException as error:
            torch.set_grad_enabled(is_grad)  # Ctrl-C may fall inside a no_grad() while it puts the mode back
            if self._built is None and self._user.get("runs") is me:
                self._recipe.tell(error)  # nobody else would say it: the ranks have not met yet
            raise
        finally:
            if "runs" in self._user and self._user["runs"] is me:  # no call, so nothing between this and the next line
                del self._user["runs"]

    def _run(self, plan: Plan, context: StepContext) -> GradientChanges:
        self._assembled.refresh()
        changes = self._runtime.run(plan, context, has_trace=self.trace)
        self._trace = self._runtime.trace or self._trace
        return changes

    def _settle(self, verdict: Verdict | None, context: StepContext, changes: GradientChanges) -> Tensor:
        """Finish the gradients, or drop them because the loss is not finite."""
        assert verdict is not None, "a training step has losses"
        if verdict.fault is None:
            changes.finish(verdict.scale)
            self._runtime.gather_ties()
            self._assembled.ties.gather(self._assembled.ranks.stages)
            self.first_step.compare(self.named_parameters(), context, verdict.value)
            context.backward_into_inputs(verdict.scale)
        elif self._on_nan == "raise":
            raise verdict.fault
        else:
            changes.undo()
            self._assembled.statistics.discard()
        return verdict.value

    def _merged(self, context: StepContext) -> Any:
        """The outputs; None on a rank that does not have the last stage."""
        if self.num_stages - 1 not in self._assembled.ranks.stages:
            return None
        outputs = [context.outputs[i] for i in range(len(context.inputs))]
        num_samples = [each.num_samples for each in context.inputs]
        return merge_outputs(outputs, num_samples, self._rule.weights(context.inputs))
