"""Optimizer state under the names of the parameters.

``Optimizer.state_dict()`` numbers parameters by their place in the groups, so its state fits only an
optimizer that was built in the same order: another cut of the pipeline would hand a momentum to the wrong
weight without a word. Names do not move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import CheckpointError

_OTHER_MODEL = "give the model that the state was saved with"

OptimizerState = dict[str, dict[str, Tensor]]


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Return parameter name → slot (``exp_avg``, …) → tensor, for parameters that have state."""
    return {
        name: {slot: torch.as_tensor(value) for slot, value in optimizer.state[parameter].items()}
        for name, parameter in names.items()
        if optimizer.state.get(parameter)
    }


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
        for slot, tensor in slots.items():
            _check_shape(name, slot, tensor, names[name])
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    name_of = {id(parameter): name for name, parameter in names.items()}
    by_index: dict[int, dict[str, Any]] = {
        index: {slot: tensor.clone() for slot, tensor in state[name_of[id(parameter)]].items()}
        for index, parameter in enumerate(order)
        if name_of[id(parameter)] in state
    }
    optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})


def _check_shape(name: str, slot: str, tensor: Tensor, parameter: nn.Parameter) -> None:
    if tensor.dim() and tensor.shape != parameter.shape:
        raise CheckpointError(
            f"the optimizer state {slot!r} of {name!r} has shape {tuple(tensor.shape)}, "
            f"the parameter {tuple(parameter.shape)}",
            _OTHER_MODEL,
        )
