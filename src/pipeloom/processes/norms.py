"""The norm of gradients that are in several processes, to the bit as torch computes it in one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn


def clip_grad_norm(
    own: Mapping[str, nn.Parameter],
    names: Sequence[str],
    max_norm: float,
    norm_type: float,
    is_strict: bool,
    gather: Callable[[bytes], list[bytes]],
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` over all processes.

    A norm of norms depends in its last bits on their order, so each weight's is gathered, and not each rank's.

    Args:
        own: this process's parameters by name.
        names: of all parameters of the model, in its order.
        max_norm: the norm that is left at most.
        norm_type: which norm.
        is_strict: raise if the norm is not finite.
        gather: gives every process's payload.

    Returns:
        The norm before, the same on every rank.
    """
    grads = {name: each.grad for name, each in own.items() if each.grad is not None}
    norms = {name: (torch.linalg.vector_norm(g, norm_type).item(), _name(g.dtype)) for name, g in grads.items()}
    found = {name: norm for said in gather(json.dumps(norms).encode()) for name, norm in json.loads(said).items()}
    in_order = dict.fromkeys([*names, *found])  # what no name is of, the model got later: a parametrization, say
    known = [found[name] for name in in_order if name in found]
    ordered = [torch.tensor(value, dtype=getattr(torch, dtype)) for value, dtype in known]
    total = torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.tensor(0.0)
    if is_strict and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they can't be clipped"
        )
    nn.utils.clip_grads_with_norm_(list(own.values()), max_norm, total)
    return total


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
