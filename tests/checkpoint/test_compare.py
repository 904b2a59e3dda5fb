"""A checkpoint of another model is refused with what differs."""

import pytest
import torch

from pipeloom.checkpoint import check_same_model
from pipeloom.errors import CheckpointError

MODEL = {"0.weight": torch.zeros(4, 2), "0.bias": torch.zeros(4)}


def test_same_model_passes() -> None:
    check_same_model({name: torch.ones_like(t) for name, t in MODEL.items()}, MODEL, "checkpoint")


@pytest.mark.parametrize(
    ("saved", "difference"),
    [
        (MODEL | {"1.weight": torch.zeros(1)}, "only in the checkpoint: 1.weight"),
        ({"0.weight": MODEL["0.weight"]}, "only in the model: 0.bias"),
        (MODEL | {"0.bias": torch.zeros(8)}, r"0.bias float32\[8\] in the checkpoint, float32\[4\] in the model"),
        (MODEL | {"0.bias": torch.zeros(4).double()}, r"float64\[4\] in the checkpoint, float32\[4\] in the model"),
    ],
)
def test_difference_is_named(saved: dict[str, torch.Tensor], difference: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?s)step-3 is a checkpoint of another model.*{difference}"):
        check_same_model(saved, MODEL, "step-3")


def test_all_kinds_of_difference_are_listed_together() -> None:
    saved = {"0.weight": torch.zeros(1), "2.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"(?s)only in the checkpoint.*only in the model.*of another form"):
        check_same_model(saved, MODEL, "step-3")


def test_long_lists_are_cut() -> None:
    saved = MODEL | {f"{i}.weight": torch.zeros(1) for i in range(1, 41)}
    with pytest.raises(CheckpointError, match=r"5\.weight, and 35 more") as caught:
        check_same_model(saved, MODEL, "step-3")
    assert len(caught.value.message) < 200
    assert "without --resume" in str(caught.value.hint)
