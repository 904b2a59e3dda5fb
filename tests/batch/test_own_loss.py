"""Where the loss is in what a model returns, and what to do where there is none."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeloom.batch.losses import LossRule
from pipeloom.batch.model_losses import own_loss
from pipeloom.errors import LossError

LOSS = torch.tensor(2.0, requires_grad=True)
LOGITS = torch.zeros(2, 3)


@dataclass
class Output:
    loss: Any
    logits: Tensor


Named = namedtuple("Named", ["logits", "loss"])


@pytest.mark.parametrize(
    "output",
    [
        LOSS,
        {"logits": LOGITS, "loss": LOSS},
        Output(LOSS, LOGITS),
        Named(LOGITS, LOSS),
        (LOSS, LOGITS),
        [LOSS],
        (LOSS, LOGITS, {"cache": None}),
        Output(LOSS.view(1), LOGITS),
    ],
    ids=lambda output: type(output).__name__,
)
def test_where_a_loss_is_found(output: Any) -> None:
    loss = LossRule(None).for_step([1], [None], 1.0)
    assert loss.compute(0, output, None).item() == 2
    assert loss.total().item() == 2


@pytest.mark.parametrize("count", [4, torch.tensor(4)])
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_sum_and_an_integer_are_a_mean(kind: type, count: Any) -> None:
    loss = LossRule(None).for_step([1], [None], 1.0)
    loss.compute(0, kind((LOSS, count)), None)
    assert loss.total().item() == 0.5
    assert loss.is_deferred


@pytest.mark.parametrize("metric", [0.9, torch.tensor(0.9)])
def test_two_floating_scalars_are_refused(metric: Any) -> None:
    with pytest.raises(LossError, match="two floating scalars, which may be"):
        own_loss((LOSS, metric))


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        ((LOGITS, LOSS), r"pass loss_fn=lambda output: output\[1\]"),
        ((torch.zeros(1, 1), LOSS), r"pass loss_fn=lambda output: output\[1\]"),
        ({"box": LOSS, "class": LOSS}, r"pass loss_fn=lambda losses: sum\(losses.values\(\)\)"),
        ({"logits": LOGITS, "loss": None}, "pass labels= if the model computes its loss"),
        (Output(None, LOGITS), "pass labels= if the model computes its loss"),
        (Output(LOGITS, LOGITS), "pass labels= if the model computes its loss"),
        ((LOGITS, LOGITS), "or holds it as .loss or as its first element"),
        ((), "or holds it as .loss or as its first element"),
    ],
)
def test_what_to_do_where_no_loss_is_found(output: Any, hint: str) -> None:
    with pytest.raises(LossError, match=rf"is needed to back-propagate from\nhint: .*{hint}"):
        LossRule(None).for_step([1], [None], 1.0).compute(0, output, None)
