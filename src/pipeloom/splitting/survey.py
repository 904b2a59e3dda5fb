"""The calls of a model's modules, and what each costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from pipeloom.errors import PipeloomError
from pipeloom.recording.dry_run import DryRun
from pipeloom.recording.node import Node
from pipeloom.recording.refusals import cannot_cut
from pipeloom.standins.placeholder import NoNumbers

Made = TypeVar("Made")

_MOST_SURVEYS = 8
"""Dry runs, each with other draws, of a model whose code draws between its modules."""


def surveyed(
    root: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]], opaque: set[str]
) -> tuple[Node, list[int]]:
    """The tree of calls, and seeds of draws, best first: where layers are skipped by chance, of a run that skips few.

    Args:
        root: the model.
        inputs: of one micro-batch.
        opaque: gets the names of modules that look at numbers.
    """
    found: list[tuple[Node, int]] = []
    failure: Exception | None = None
    for seed in range(_MOST_SURVEYS):
        survey = DryRun(root, None, opaque, seed=seed)
        try:
            survey.run(*inputs)
        except NoNumbers as error:
            if not survey.tree.children:
                raise cannot_cut(error) from error
        except Exception as error:
            if not survey.has_drawn:
                raise
            failure = failure or error  # with other draws it may go well
            continue
        found.append((survey.tree, seed))
        if not survey.has_drawn:
            break
    if not found and failure is not None:
        raise failure
    found.sort(key=lambda each: (-each[0].num_calls, each[1]))
    return found[0][0], [seed for _, seed in found]


def first_that_goes(make: Callable[[int], Made], seeds: list[int]) -> Made:
    """What is made with the first of some seeds with which the model's own code does not fail.

    It may fail for some draws: a loss over layers, all of which were skipped.
    """
    for seed in seeds[:-1]:
        try:
            return make(seed)
        except PipeloomError:
            raise
        except Exception:  # with other draws it may go well
            continue
    return make(seeds[-1])
