"""What Pipeloom makes of one model of the zoo, by the yardstick that torch's `pipeline()` is held against."""

from __future__ import annotations

import copy
import time
from typing import Any

import pipeloom as pl
from benchmarks.zoo.torch_pipelining import differences, first_line, plain, without_dropout
from tests.zoo import models


def cut_figures(name: str, num_stages: int) -> dict[str, Any]:
    """Calls of units, glue that one stage runs, values that cross a cut, and how long it took to find out."""
    model, inputs = models.build(name), models.microbatches(name, 1)[0]
    began_s = time.perf_counter()
    outline = pl.split(model, (), inputs, num_stages=num_stages)
    split_s = time.perf_counter() - began_s
    glue = sum(call.stage is not None for call in outline.glue)
    return {"units": len(outline.units), "glue": glue, "crossing": len(outline.values or ()), "split_s": split_s}


def step(name: str, num_stages: int) -> dict[str, Any]:
    """One step beside the plain model's, in the form of a row about torch."""
    model = without_dropout(models.build(name))
    reference = copy.deepcopy(model)
    row: dict[str, Any] = {"model": name, "asked_stages": num_stages, "is_loss_inside": models.loss_of(name) is None}
    row |= {"traces": True, "splits": False, "trains": False}
    try:
        row |= cut_figures(name, num_stages) | {"splits": True}
        options = {"num_stages": num_stages, "num_microbatches": models.NUM_MICROBATCHES}
        with pl.Pipeline(model, schedule="1f1b", loss_fn=models.loss_of(name), **options) as pipe:
            found = pipe.step(**models.batch(name))
            grads = {key: each.grad for key, each in pipe.named_parameters() if each.grad is not None}
        row["trains"] = True
    except Exception as error:
        return row | {"error": first_line(error)}
    expected = plain(reference, models.microbatches(name), models.loss_in)
    worst, where = max(differences([{"grads": grads}], reference))
    off = float((found - expected).abs() / expected.abs())
    return row | {"loss_off": off, "worst_gradient_off": worst, "worst_gradient": where}
