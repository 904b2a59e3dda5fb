"""The zoo itself: models that build, run and repeat themselves, or nothing could be held against them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import models

ROOT = Path(__file__).parents[2]
LOSS_OF_ITS_OWN = {"llama": True, "clip (two towers)": True, "patchtst (time series)": True, "detr": False}


def accumulated(model: nn.Module, name: str) -> list[Tensor | None]:
    """The losses of the micro-batches in order, and what they add up to in every gradient."""
    torch.manual_seed(5)
    losses = [models.loss_in(model(**inputs)) for inputs in models.microbatches(name)]
    for loss in losses:
        loss.backward()
    return [*losses, *(parameter.grad for parameter in model.parameters())]


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


@pytest.mark.parametrize("name", models.NAMES)
def test_a_model_repeats_its_bits(name):
    pytest.importorskip(models.ROWS[name].package)
    model = models.build(name)
    once, again = (accumulated(copy.deepcopy(model), name) for _ in range(2))
    assert all(map(is_same, once, again))
    assert all(torch.isfinite(each).all() for each in once if each is not None)


@pytest.mark.parametrize("name", models.NAMES)
def test_a_seed_settles_the_weights_and_training_is_on(name):
    pytest.importorskip(models.ROWS[name].package)
    before = torch.random.get_rng_state()
    one, same, other = (list(models.build(name, seed).parameters()) for seed in (3, 3, 4))
    assert all(map(torch.equal, one, same))
    assert not all(map(torch.equal, one, other))
    assert models.build(name).training
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", models.NAMES)
def test_a_batch_is_its_microbatches_one_after_another(name):
    pytest.importorskip(models.ROWS[name].package)
    parts, whole = models.microbatches(name), models.batch(name)
    for key, value in whole.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, torch.cat([part[key] for part in parts]))
        else:
            assert {part[key] for part in parts} == {value}


@pytest.mark.parametrize(("name", "has_own"), LOSS_OF_ITS_OWN.items())
def test_a_model_that_is_given_labels_has_its_own_loss(name, has_own):
    pytest.importorskip("transformers")
    assert (models.loss_of(name) is None) is has_own
    output = models.build(name)(**models.microbatches(name, 1)[0])
    assert (output.loss is not None) is has_own
    assert models.loss_in(output).shape == ()


@dataclass
class Output:
    first: Tensor
    rest: object


def test_the_loss_counts_every_floating_tensor_of_an_output():
    three, one = torch.full((2, 2), 3.0), torch.ones(5)
    output = Output(three, {"levels": [one, (three, None)], "ids": torch.tensor([7]), "name": "x"})
    assert [tensor.shape[0] for tensor in models.tensors(output)] == [2, 5, 2, 1]
    assert models.mean_squares(output).item() == 9 + 1 + 9


def test_an_outputs_own_loss_goes_before_its_tensors():
    class WithLoss:
        loss = torch.tensor(2.0)

    assert models.loss_in(WithLoss()).item() == 2
    assert models.loss_in({"logits": torch.full((3,), 2.0)}).item() == 4


def test_torchvision_loads_where_it_is():
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    import torchvision

    assert torchvision.models.resnet18().fc.out_features == 1000


def test_the_zoo_and_ci_pin_the_same_versions():
    pins = []
    for name in ("zoo", "ci"):
        lines = (ROOT / f"requirements/{name}.txt").read_text().splitlines()
        pins.append(dict(line.split("==") for line in lines if not line.startswith("#")))
    zoo, ci = pins
    assert {name: zoo[name] for name in zoo.keys() & ci.keys()} == {name: ci[name] for name in zoo.keys() & ci.keys()}
    assert {"torch", "transformers", "timm", "diffusers", "torchvision", "ultralytics"} <= zoo.keys()


def test_the_package_never_depends_on_ultralytics():
    assert "ultralytics" not in (ROOT / "pyproject.toml").read_text()
    assert "ultralytics" not in (ROOT / "requirements/ci.txt").read_text()
