"""`pipeloom check`: does a model of the user's pipeline? One step with a pipeline, one without, compared."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator
from typing import Any

from pipeloom.cli.codes import FOUND_FAULTS
from pipeloom.cli.parser import Parser, add_model, count
from pipeloom.cli.terminal import print_error
from pipeloom.errors import ConfigError, DrawError, NonFiniteLoss, PipeloomError, SplitError, UncuttableCode

_WIDTH = 120


def run(argv: list[str]) -> int:
    """Run the command.

    Returns:
        0 if the pipeline computes what the model computes; 1 if it does not, or the model cannot be cut or run.

    Raises:
        PipeloomError: a wrong value.
    """
    options = parser().parse(argv)
    from pipeloom.cli.loading import load, user_code
    from pipeloom.testing.advice import advice
    from pipeloom.testing.check import check

    device = _device(options.device)
    loaded = load(options.model, options.inputs, is_bare=False)
    if options.stages is None and options.cuts is None and not isinstance(loaded.model, list):
        raise SplitError("the number of stages is missing", "give --stages N, or say where to cut with --cuts")
    args, kwargs = loaded.required_inputs
    try:
        with user_code(options.model):
            checked = check(
                loaded.model, args, kwargs, num_stages=options.stages, cuts=options.cuts, schedule=options.schedule,
                num_microbatches=options.micro_batches, device=device, seed=options.seed,
            )  # fmt: skip
            hints = advice(checked, loaded.model)
    except PipeloomError as error:
        if not _is_about_the_model(error):
            raise
        print_error(f"{options.model} cannot be checked: {error.message}", error.hint)
        return FOUND_FAULTS
    if options.json:
        print(json.dumps(_figures(checked, hints)))
    else:
        for line in _lines(checked, hints):
            print(line)
    return 0 if checked.is_right else FOUND_FAULTS


def parser() -> Parser:
    """The command's options."""
    made = Parser(
        "check",
        "MODULE:FACTORY --stages N [OPTIONS]",
        "Run one step of a model through a pipeline and one without, compare the loss and every gradient, and say what "
        "could be better. Exit code 1: they differ, or the model cannot be cut.",
    )
    add_model(made, ". Inputs are a whole batch")
    made.add_argument("--schedule", metavar="NAME", default="1f1b", help="the schedule; default 1f1b")
    made.add_argument(
        "-m", "--micro-batches", metavar="N", type=count, help="micro-batches of the batch; default 4, or its rows"
    )
    made.add_argument("--device", metavar="NAME", help="where all of it runs, as cuda; default: where the model is")
    made.add_argument("--seed", metavar="N", type=int, default=0, help="of random draws in the model; default 0")
    made.add_argument("--json", action="store_true", help="print everything as JSON")
    return made


def _device(name: str | None) -> Any:
    """The device that is meant.

    Raises:
        ConfigError: there is none of that name here.
    """
    if name is None:
        return None
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"--device {name} cannot be used: {reason}", "name one that is here, as cpu or cuda:0"
        ) from None
    if device.type == "meta":
        raise ConfigError("--device meta was given, where no numbers are", "name one that computes, as cpu or cuda:0")
    return device


def _is_about_the_model(error: PipeloomError) -> bool:
    """Whether it says what the model's code does, and not what was asked for wrongly."""
    return isinstance(error, DrawError | NonFiniteLoss | UncuttableCode)


def _lines(checked: Any, hints: list[str]) -> Iterator[str]:
    from pipeloom.parity.comparison import first_of

    comparison = checked.comparison
    yield f"verdict: {_verdict(comparison)}"
    yield f"loss: {comparison.loss:.9g} pipelined, {comparison.expected_loss:.9g} sequential"
    for each in comparison.wrong:
        yield f"  wrong: {each}"
    if comparison.inexact:
        yield f"  not to the bit: {first_of(comparison.inexact)}"
    yield ""
    yield str(checked.outline)
    yield ""
    schedule = checked.timeline.schedule
    yield (
        f"{schedule.name}: {schedule.num_ranks} ranks, {checked.num_microbatches} micro-batches of a batch of "
        f"{checked.rows} rows"
    )
    shown = ", ".join(f"{1e3 * each:.3g} ms" for each in checked.stage_s)
    yield f"forward and backward of a micro-batch, by stage: {shown}"
    yield f"bubble: {checked.timeline.bubble_fraction:.0%} measured, with all ranks on {_machine()};"
    yield f"  {checked.predicted.bubble_fraction:.0%} simulated from these times, with a device for each rank"
    if hints:
        yield ""
        yield "advice:"
        for hint in hints:
            for number, line in enumerate(hint.splitlines()):
                yield textwrap.fill(line, _WIDTH, initial_indent="  " if number else "- ", subsequent_indent="  ")


def _machine() -> str:
    cores = os.cpu_count() or 1
    return f"this machine ({cores} core{'s' if cores > 1 else ''})"


def _verdict(comparison: Any) -> str:
    num_grads = len(comparison.differences) - 1
    of = f"of the loss and {num_grads} gradients"
    if comparison.wrong:
        return f"WRONG: {len(comparison.wrong)} {of} differ from the un-pipelined model"
    if comparison.inexact:
        return f"right: {len(comparison.inexact)} {of} differ, by no more than the order of sums explains"
    return f"right: the loss and {num_grads} gradients are equal to the bit"


def _figures(checked: Any, hints: list[str]) -> dict[str, Any]:
    comparison, schedule = checked.comparison, checked.timeline.schedule
    return {
        "verdict": "wrong" if comparison.wrong else "right",
        "bit_equal": comparison.is_bit_equal,
        "loss": comparison.loss,
        "sequential_loss": comparison.expected_loss,
        "has_own_loss": checked.has_own_loss,
        "tensors": [
            {"name": each.name, "bit_equal": each.is_bit_equal, "right": each.is_right, "relative": each.relative,
             "what": each.what}
            for each in comparison.differences
        ],
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_microbatches": checked.num_microbatches,
        "stage_s": checked.stage_s,
        "bubble_fraction": checked.timeline.bubble_fraction,
        "simulated_bubble_fraction": checked.predicted.bubble_fraction,
        "split": checked.outline.as_dict(),
        "advice": hints,
    }  # fmt: skip
