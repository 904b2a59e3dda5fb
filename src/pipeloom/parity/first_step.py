"""``verify=True``: the first step of a pipeline, held against the un-pipelined model.

Before the step the user's own module runs the same micro-batches, with the same random draws, and everything it
changes is put back. The step runs as ever; then each parameter's gradient is compared. It needs the whole model in this
process, on one device: where ranks are processes no rank has that, and gathering it would undo what they are for.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from pipeloom.assembly import Assembly
from pipeloom.batch.losses import StepLoss
from pipeloom.errors import ParityError, PipeloomWarning
from pipeloom.ir import Schedule
from pipeloom.parity.comparison import Comparison, Difference, Pair, compared, first_of
from pipeloom.parity.expected import Expected, expected_of
from pipeloom.runtime.context import StepContext
from pipeloom.splitting import Split, Ties

_CHECK = "`pipeloom check` compares the model in one process, on the CPU if need be"


class FirstStep:
    """The check of a pipeline's first step.

    Args:
        is_wanted: without it nothing is done.

    Attributes:
        comparison: what came out; None before.
    """

    def __init__(self, is_wanted: bool) -> None:
        self._is_due = is_wanted
        self._expected: Expected | None = None
        self._shared: set[int] = set()
        self.comparison: Comparison | None = None

    @contextmanager
    def checking(self, assembly: Assembly, context: StepContext, schedule: Schedule) -> Iterator[None]:
        """Put this around a step: finds what it should compute. Warns, and is over, where that cannot be found.

        Args:
            assembly: the cut model.
            context: of the step.
            schedule: that the step runs.
        """
        if self._is_due and context.loss is not None:
            self._begin(assembly, context, context.loss, schedule)
        try:
            yield
        finally:
            self._expected = None

    def _begin(self, assembly: Assembly, context: StepContext, loss: StepLoss, schedule: Schedule) -> None:
        made, ties = assembly.split, assembly.ties
        if any(isinstance(each, UninitializedParameter) for each in made.root.parameters()):
            return  # a lazy layer gets its weights in the first step, and the second is checked
        hindrance = _hindrance(made, assembly.ranks.stages)
        if hindrance is not None:
            self._give_up(*hindrance)
            return
        assembly.ranks.runtime.wait_for_late_ranks()
        ties.refresh(range(made.num_stages))
        self._shared = _regrouped(made, ties)
        devices = _devices(made)
        device = devices.pop() if devices and devices != {torch.device("cpu")} else None
        try:
            self._expected = expected_of(made, ties, context, loss, schedule, device)
        except torch.OutOfMemoryError as error:
            self._give_up(f"the whole model does not fit: {str(error).splitlines()[0]}", _CHECK)

    def compare(self, parameters: Iterable[tuple[str, nn.Parameter]], context: StepContext, loss: Tensor) -> None:
        """After the step, before it counts: hold loss and gradients against what they should be.

        Args:
            parameters: the whole model's, each once, with its name.
            context: of the step.
            loss: what the step returns.

        Raises:
            ParityError: they differ by more than regrouped sums explain.
        """
        expected, self._expected = self._expected, None
        if expected is None:
            return
        self._is_due = False
        pairs = [*self._pairs(expected, parameters, context), *_input_pairs(expected, context)]
        coarsest = _coarsest(context, loss)
        differences = compared([Pair("loss", loss, expected.loss, bool(self._shared), coarsest), *pairs])
        self.comparison = Comparison(float(loss), float(expected.loss), differences)
        if self.comparison.wrong:
            raise _refused(self.comparison)
        unexplained = [each for each in self.comparison.inexact if not each.is_regrouped]
        if unexplained:
            _warn(unexplained)

    def _pairs(
        self, expected: Expected, parameters: Iterable[tuple[str, nn.Parameter]], context: StepContext
    ) -> Iterator[Pair]:
        named: dict[nn.Parameter, str] = {parameter: name for name, parameter in parameters}
        assert context.loss is not None, "a training step has a loss"
        for number, parameter in enumerate(context.loss.rule.parameters):
            named.setdefault(parameter, f"parameter {number} of the loss function")
        for parameter, name in named.items():
            is_regrouped = id(parameter) in self._shared
            coarsest = _coarsest(context, parameter)
            yield Pair(name, parameter.grad, expected.grads.get(id(parameter)), is_regrouped, coarsest)

    def _give_up(self, why: str, hint: str) -> None:
        self._is_due = False
        warnings.warn(
            f"verify=True compares with the whole model in this process, on one device; {why}, so the first step was "
            f"not verified\nhint: {hint}",
            PipeloomWarning,
            stacklevel=6,  # the caller of step()
        )


def _hindrance(made: Split, stages: Iterable[int]) -> tuple[str, str] | None:
    if len(set(stages)) < made.num_stages:
        return "here ranks are processes, and none has it all", _CHECK
    devices = _devices(made)
    if len(devices) > 1:
        return f"here it is on {', '.join(sorted(map(str, devices)))}", f"leave devices= out once, or: {_CHECK}"
    return None


def _devices(made: Split) -> set[torch.device]:
    return {each.device for unit in made.units for each in unit.module.parameters()}


def _regrouped(made: Split, ties: Ties) -> set[int]:
    """The parameters whose gradients are other sums in the pipeline than in the whole model, by their ids."""
    places = (each for unit in made.units for each in unit.module.parameters())
    return {id(ties.owner_of(each)) for each in places if ties.is_copy(each)}


def _input_pairs(expected: Expected, context: StepContext) -> Iterator[Pair]:
    for microbatch, found in sorted(context.input_grads.items()):
        wanted = expected.input_grads.get(microbatch, [])
        for leaf, (grad, other) in enumerate(zip(found, wanted, strict=False)):
            if grad is not None or other is not None:
                coarsest = _coarsest(context, grad if grad is not None else other)
                yield Pair(f"input {leaf} of micro-batch {microbatch}", grad, other, False, coarsest)


def _coarsest(context: StepContext, tensor: Tensor | None) -> torch.dtype:
    """The coarsest type that takes part in computing a tensor."""
    own = torch.float32 if tensor is None else tensor.dtype
    types = [own.to_real() if own.is_complex else own]
    types += [each.dtype for each in context.ambient.autocasts if each.is_enabled]
    rounding: Mapping[torch.dtype, float] = {each: torch.finfo(each).eps for each in types}
    return max(rounding, key=lambda each: rounding[each])


def _refused(comparison: Comparison) -> ParityError:
    wrong = comparison.wrong
    return ParityError(
        f"the first step does not compute what the un-pipelined model computes: {first_of(wrong)} "
        f"({len(wrong)} of {len(comparison.differences)} differ, the loss among them)"
        if wrong[0].name == "loss"
        else f"the first step does not compute what the un-pipelined model computes: {first_of(wrong)} "
        f"({len(wrong)} of {len(comparison.differences)} differ; the loss does not)",
        "look for what a forward keeps from call to call, or changes outside of the module; other cuts= may keep it in "
        "one stage, and `pipeloom check` prints every parameter",
        comparison=comparison,
    )


def _warn(unexplained: list[Difference]) -> None:
    warnings.warn(
        f"the first step is right, but not to the bit: {first_of(unexplained)}\n"
        "hint: a kernel that adds up in another order each time explains it; torch.use_deterministic_algorithms(True) "
        "finds such kernels",
        PipeloomWarning,
        stacklevel=5,  # the caller of step()
    )
