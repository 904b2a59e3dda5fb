"""Optimizer state moves by name, whatever the order of the parameters."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from pipeloom.checkpoint import load_optimizer_state, optimizer_state
from pipeloom.checkpoint.optimizer import hyperparameters, load_hyperparameters
from pipeloom.errors import CheckpointError


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        inputs = torch.linspace(-1, 1, 12).reshape(3, 4) + step
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    target.load_state_dict(source.state_dict())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("make", [adamw, momentum])
def test_restored_optimizer_goes_on_bit_equal(make) -> None:
    model, other = make_model(0), make_model(1)
    optimizer, restored = make(model.parameters()), make(reversed(list(other.parameters())))
    take_steps(model, optimizer, 3)
    copy_weights(model, other)
    load_optimizer_state(
        restored, dict(other.named_parameters()), optimizer_state(optimizer, dict(model.named_parameters()))
    )
    take_steps(model, optimizer, 2)
    take_steps(other, restored, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_state_has_the_models_names() -> None:
    model = make_model(0)
    optimizer = adamw(model.parameters())
    take_steps(model, optimizer, 2)
    state = optimizer_state(optimizer, dict(model.named_parameters()))
    assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert state["0.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert state["2.bias"]["step"].item() == 2


def test_parameter_without_gradient_has_no_state() -> None:
    model = make_model(0)
    model[0].requires_grad_(False)
    optimizer = adamw(model.parameters())
    take_steps(model, optimizer, 1)
    assert list(optimizer_state(optimizer, dict(model.named_parameters()))) == ["2.weight", "2.bias"]


def test_restoring_leaves_the_saved_state_alone() -> None:
    model = make_model(0)
    optimizer = adamw(model.parameters())
    take_steps(model, optimizer, 1)
    names = dict(model.named_parameters())
    saved = {name: {slot: t.clone() for slot, t in s.items()} for name, s in optimizer_state(optimizer, names).items()}
    load_optimizer_state(optimizer, names, saved)
    take_steps(model, optimizer, 1)
    assert saved["0.weight"]["step"].item() == 1
    assert optimizer_state(optimizer, names)["0.weight"]["step"].item() == 2


def test_hyperparameters_stay_the_optimizers_own() -> None:
    model = make_model(0)
    optimizer = adamw(model.parameters())
    take_steps(model, optimizer, 1)
    names = dict(model.named_parameters())
    other = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.25)
    load_optimizer_state(other, names, optimizer_state(optimizer, names))
    assert (other.param_groups[0]["lr"], other.param_groups[0]["weight_decay"]) == (0.5, 0.25)


class Counting(torch.optim.Optimizer):
    """Counts in a plain number, as many optimizers do."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1


def test_plain_numbers_stay_plain_numbers() -> None:
    model, other = make_model(0), make_model(1)
    optimizer, restored = Counting(model.parameters()), Counting(other.parameters())
    take_steps(model, optimizer, 3)
    state = optimizer_state(optimizer, dict(model.named_parameters()))
    load_optimizer_state(restored, dict(other.named_parameters()), state)
    assert [type(slots["step"]) for slots in restored.state.values()] == [int] * 4
    take_steps(other, restored, 1)
    assert {slots["step"] for slots in restored.state.values()} == {4}


def test_optimizer_of_more_than_the_model_takes_what_is_the_models() -> None:
    model, other, outside = make_model(0), make_model(1), nn.Parameter(torch.ones(2))
    optimizer = adamw(model.parameters())
    take_steps(model, optimizer, 1)
    larger = adamw([outside, *other.parameters()])
    load_optimizer_state(
        larger, dict(other.named_parameters()), optimizer_state(optimizer, dict(model.named_parameters()))
    )
    assert outside not in larger.state
    assert torch.equal(larger.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_options_go_by_name() -> None:
    model = make_model(0)
    named = dict(model.named_parameters())
    saved = torch.optim.SGD([{"params": [named["0.weight"]], "lr": 0.5}, {"params": [named["2.bias"]]}], lr=0.25)
    loaded = torch.optim.SGD([{"params": [named["2.bias"]]}, {"params": [named["0.bias"]]}], lr=0.125)
    load_hyperparameters(loaded, named, hyperparameters(saved, named))
    assert [group["lr"] for group in loaded.param_groups] == [0.25, 0.125]
    assert [group["names"] for group in hyperparameters(saved, named)] == [["0.weight"], ["2.bias"]]


def test_state_of_an_unknown_parameter_is_refused() -> None:
    model = make_model(0)
    with pytest.raises(CheckpointError, match=r"'9\.weight' that the model does not have"):
        load_optimizer_state(
            adamw(model.parameters()), dict(model.named_parameters()), {"9.weight": {"exp_avg": torch.zeros(1)}}
        )


def test_state_of_another_shape_is_refused() -> None:
    model = make_model(0)
    state = {"0.weight": {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4, 8)}}
    with pytest.raises(CheckpointError, match=r"'exp_avg' of '0\.weight' has shape \(4, 8\), the parameter \(8, 4\)"):
        load_optimizer_state(adamw(model.parameters()), dict(model.named_parameters()), state)
