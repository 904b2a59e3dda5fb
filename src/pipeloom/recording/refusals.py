"""Why a model cannot be cut, in words: the line of the model's code, the value, and what to do."""

from __future__ import annotations

import contextlib
import linecache
import random
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from pipeloom.errors import PipeloomError, UncuttableCode
from pipeloom.standins.functions import Met
from pipeloom.standins.placeholder import NoNumbers, Unseen

_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), contextlib.__file__, random.__file__)


def cannot_cut(error: BaseException) -> UncuttableCode:
    """The error for code that depends on numbers which only one stage has."""
    stack = [name for name in getattr(error, "stack", []) if name]
    module = stack[-1] if stack else ""
    where = f"module {module!r}" if module else "the model's own forward"
    does = (
        "does what stages cannot do for each other"
        if isinstance(error, Unseen)
        else "looks at numbers that another stage may have"
    )
    return UncuttableCode(
        f"{where} {does}: {line_of(error)}; {error}",
        "keep that part within one module, which then stays whole in a stage; or do it in loss_fn, on the output",
    )


def not_here(error: NoNumbers) -> UncuttableCode:
    """The error for code that uses, on a stage, what only another one knows, and what the dry run let pass."""
    return UncuttableCode(
        f"the model's code uses what only another stage knows: {line_of(error)}; {error}",
        "let the module that makes it return a tensor, which other stages get; or keep what makes it and what uses it "
        "within one module, or in one stage with cuts=",
    )


def too_early(tail: UncuttableCode, units: Sequence[str], num_stages: int, cuts: Sequence[str]) -> UncuttableCode:
    """The error for code that looks at numbers so early that too much of the model would be in the last stage.

    Args:
        tail: says where that is.
        units: those that are called before, in order.
        num_stages: that were asked for.
        cuts: the nearest that work, by name.
    """
    last = f"the output of {units[-1]!r}, or what became of it" if units else "a value"
    works = f"cuts={list(cuts)} works, or " if cuts else ""
    calls = "1 call before it doesn't" if len(units) == 1 else f"{len(units)} calls before it don't"
    return UncuttableCode(
        f"{tail.message}; what it looks at is {last}. All that comes after has to be in the last stage, and the "
        f"{calls} make {num_stages} stages that are about as heavy",
        f"{works}ask for fewer stages, keep that part within one module, or do it in loss_fn, on the output",
    )


def check_ready(root: nn.Module) -> None:
    """Raise for a model that cannot be run without numbers as it is.

    Raises:
        UncuttableCode: it is compiled as a whole, or has a lazy layer that has no size yet.
    """
    if hasattr(root, "_orig_mod"):
        raise UncuttableCode(
            "a model compiled whole by torch.compile was given; its parts have to be called one by one to be cut",
            "pass the model itself, and compile its blocks: for block in model.layers: block.compile()",
        )
    for name, parameter in root.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UncuttableCode(
                f"{name!r} belongs to a lazy layer, which has no size before its first call; stages are balanced by it",
                "call the model once before",
            )


def called_again(name: str, home: int, now: int) -> UncuttableCode:
    """The error for inputs with which the model's code calls units in another order than with the first ones."""
    return UncuttableCode(
        f"with these inputs the model calls {name!r} of stage {home} after units of stage {now}; with the inputs by "
        "which it was cut it did not, and a stage cannot run again after a later one",
        f"cut it by inputs that take the longer way (example_args=), or keep {name!r} and what is called before it in "
        "one stage with cuts=",
    )


def came_otherwise(name: str, error: BaseException) -> UncuttableCode:
    """The error for a unit that finds a value of another stage elsewhere than in its arguments."""
    return UncuttableCode(
        f"{name!r} uses a value that another stage has, and that is not among its arguments but inside of an object (a "
        f"key–value cache, which PEFT's prefix tuning fills, is one) or left behind somewhere: {line_of(error)}; only "
        "tensors travel, alone or in tuples, lists and dicts",
        f"pass it to {name!r} as an argument, or cut such that one stage has what makes it and all that use it (cuts=)",
    )


@contextlib.contextmanager
def in_dry_run() -> Iterator[None]:
    """Say of what a model's own code raises that it was in a dry run."""
    try:
        yield
    except (NoNumbers, Met, PipeloomError):
        raise
    except Exception as error:
        note = (
            "raised while the model ran to see how to cut it: on one micro-batch, with placeholders for weights and "
            "what is made of them (shapes and types, no numbers), and without the hooks that you have registered"
        )
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def line_of(error: BaseException) -> str:
    """The last line of the user's, or a library's, code in a traceback."""
    seen: BaseException | None = error
    while seen is not None:
        for frame, number in reversed(list(traceback.walk_tb(seen.__traceback__))):
            if is_of_the_user(frame.f_code.co_filename):
                return in_words(frame.f_code.co_filename, number)
        seen = seen.__cause__
    return "(no line of Python)"


def line_at(frame: FrameType | None) -> str:
    """The line of the user's, or a library's, code that runs now, innermost first."""
    while frame is not None and not is_of_the_user(frame.f_code.co_filename):
        frame = frame.f_back
    return "(no line of Python)" if frame is None else in_words(frame.f_code.co_filename, frame.f_lineno)


def is_of_the_user(file: str) -> bool:
    """Whether a line of a file is one to name: neither ours nor torch's, nor of the standard library's `random`."""
    return not file.startswith(_OURS) and not file.startswith("<frozen")


def in_words(file: str, number: int) -> str:
    """A line of code, with its place."""
    return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}"
