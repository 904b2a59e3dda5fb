"""One parameter takes another's place without anybody who holds it noticing.

Assigning to the module that was asked about leaves every other holder with the old object: tied modules, flat lists of
an RNN, the parametrisation that wraps it. So the object stays and its content is exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def like(parameter: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """Return a parameter with these values and everything else of ``parameter``: class, flags, attributes."""
    made = torch.Tensor._make_subclass(type(parameter), tensor, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def become(parameter: nn.Parameter, other: nn.Parameter) -> bool:
    """Give a parameter the content of ``other``; False, and nothing done, if somebody holds it weakly or in a graph."""
    try:
        torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return what is left of a parameter without its values."""
    bare = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return like(parameter, bare)
