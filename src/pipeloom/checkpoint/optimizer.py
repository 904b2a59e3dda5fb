"""Optimizer state under the names of the parameters.

``Optimizer.state_dict()`` numbers parameters by their place in the groups, so its state fits only an
optimizer that was built in the same order: another cut of the pipeline would hand a momentum to the wrong
weight without a word. Names do not move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from pipeloom.errors import CheckpointError

_OTHER_MODEL = "give the model that the state was saved with"

OptimizerState = dict[str, dict[str, Any]]

# How an update is computed, not what it computes: the optimizer that is there knows its devices.
_HOW: Final = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Return parameter name → slot (``exp_avg``, …) → tensor or number, for parameters that have state.

    Raises:
        CheckpointError: there is state of a parameter that has no name, which would be lost.
    """
    named = {id(parameter) for parameter in names.values()}
    lost = [parameter for parameter, slots in optimizer.state.items() if slots and id(parameter) not in named]
    if lost:
        raise CheckpointError(
            f"the optimizer has state of a parameter of shape {tuple(lost[0].shape)} that is not the model's",
            "give the optimizer the parameters of the pipeline: torch.optim.AdamW(pipe.parameters())",
        )
    return {
        name: dict(optimizer.state[parameter]) for name, parameter in names.items() if optimizer.state.get(parameter)
    }


def hyperparameters(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Return the optimizer's groups: ``{"names": [...], "options": {"lr": ..., ...}}``."""
    name_of = {id(parameter): name for name, parameter in names.items()}
    return [
        {
            "names": [name_of[id(parameter)] for parameter in group["params"] if id(parameter) in name_of],
            "options": {option: value for option, value in group.items() if option not in _HOW},
        }
        for group in optimizer.param_groups
    ]


def load_hyperparameters(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Give each of the optimizer's groups the options that its parameters had.

    Raises:
        CheckpointError: two parameters of one group had different options.
    """
    saved = {name: group["options"] for group in groups for name in group["names"]}
    wanted: list[dict[str, Any]] = []
    for group in hyperparameters(optimizer, names):
        known = [name for name in group["names"] if name in saved]
        for name in known:
            _check_options(known[0], saved[known[0]], name, saved[name])
        wanted.append(saved[known[0]] if known else {})
    for group, options in zip(optimizer.param_groups, wanted, strict=True):
        group.update(options)


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], state: OptimizerState
) -> None:
    """Put saved state back by name; the groups' hyperparameters stay the optimizer's own.

    Raises:
        CheckpointError: state of a parameter that the model does not have, or of another shape.
    """
    for name, slots in state.items():
        if name not in names:
            what = f"the optimizer state is of a parameter {name!r} that the model does not have"
            raise CheckpointError(what, _OTHER_MODEL)
        for slot, value in slots.items():
            _check_shape(name, slot, value, names[name])
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    name_of = {id(parameter): name for name, parameter in names.items()}
    by_index: dict[int, dict[str, Any]] = {
        index: {slot: _own(value) for slot, value in state[name_of[id(parameter)]].items()}
        for index, parameter in enumerate(order)
        if name_of.get(id(parameter)) in state
    }
    optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _check_shape(name: str, slot: str, value: Any, parameter: nn.Parameter) -> None:
    if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
        raise CheckpointError(
            f"the optimizer state {slot!r} of {name!r} has shape {tuple(value.shape)}, "
            f"the parameter {tuple(parameter.shape)}",
            _OTHER_MODEL,
        )


def _check_options(one: str, options: Mapping[str, Any], other: str, others: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if others.get(option) != value:
            raise CheckpointError(
                f"{one!r} and {other!r} are in one group of the optimizer, but were saved with {option} {value} and "
                f"{others.get(option)}",
                "make the groups as they were when the checkpoint was saved",
            )
