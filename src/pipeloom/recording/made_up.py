"""A module that runs for real in a dry run, because its shapes depend on numbers: on numbers that are made up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pipeloom.batch.trees import flatten, unflatten
from pipeloom.standins.clone import HOOKS, Clones
from pipeloom.standins.placeholder import Placeholder
from pipeloom.standins.unknown import Unknown

_ABSENT = object()


def run_for_real(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    hooked: Mapping[str, nn.Module] = MappingProxyType({}),
    variant: int = 0,
) -> tuple[Any, int]:
    """Call a module on made-up numbers in the place of placeholders; nothing of it changes.

    Args:
        module: the module.
        args: of the call.
        kwargs: likewise.
        device: of the placeholders that come out.
        hooked: by name within the module, those whose forward hooks are to see placeholders, and whose attributes
            are to get those for tensors that the module left there, and to say which plain values it made.
        variant: which numbers are made up; but for 0, those of given real ones are others too.

    Returns:
        What it returned, with placeholders for tensors (an input that was returned is that input), and the FLOPs.
    """
    leaves, structure = flatten((args, kwargs))
    made = {id(leaf): _made_up(leaf, variant) for leaf in leaves if isinstance(leaf, Tensor)}
    closing = _Closing({id(made[id(leaf)]): leaf for leaf in leaves if isinstance(leaf, Tensor)}, device)
    clones = Clones(module, lambda _, __: False, _never)
    for name, clone in clones.of.items():
        clone.__dict__["_parameters"] = {key: _filled(each) for key, each in clone._parameters.items()}
        clone._buffers = {key: _copied(each) for key, each in clone._buffers.items()}
        for hooks in HOOKS:
            clone.__dict__[hooks] = OrderedDict()
        for hook in list(hooked[name]._forward_hooks.values()) if name in hooked else ():
            clone.register_forward_hook(partial(_closed_hook, closing, hook))
    inner_args, inner_kwargs = unflatten([made.get(id(leaf), leaf) for leaf in leaves], structure)
    with torch.random.fork_rng(devices=[]), _Counting() as counting:  # type: ignore[no-untyped-call]
        out = clones.root(*inner_args, **inner_kwargs)
    _note_left(clones, hooked, closing)
    return closing.of(out), counting.num_flops


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs that torch's `FlopCounterMode` counts.

    That one also follows modules, by hooks on what they are given, which fail inside of a custom
    `torch.autograd.Function`: its inputs require gradients, and no graph is recorded there.
    """

    num_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.num_flops += int(count(*args, **(kwargs or {}), out_val=out))
        return out


class _Closing:
    """Placeholders for the tensors of a run for real: always the same one for a tensor.

    Args:
        owners: by the id of a tensor that was made up, what it was made up for.
        device: of the others.
    """

    def __init__(self, owners: dict[int, Tensor], device: torch.device) -> None:
        self._found, self._device = owners, device
        self._alive: list[Any] = []

    def of(self, value: Any) -> Any:
        """The same value with placeholders for tensors."""
        leaves, structure = flatten(value)
        self._alive.append(leaves)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in self._found:
                self._found[id(leaf)] = Placeholder.like(leaf, self._device)
        return unflatten([self._found.get(id(leaf), leaf) for leaf in leaves], structure)


def _closed_hook(closing: _Closing, hook: Any, module: nn.Module, args: Any, out: Any) -> None:
    hook(module, closing.of(args), closing.of(out))


def _note_left(clones: Clones, stand_ins: Mapping[str, nn.Module], closing: _Closing) -> None:
    for name, stand_in in stand_ins.items():
        before, now = vars(clones.originals[name]), vars(clones.of[name])
        for key, value in now.items():
            if isinstance(value, int | float | str) and key != "training" and value != before.get(key, _ABSENT):
                stand_in.__dict__[key] = Unknown(f"{name}.{key}".lstrip("."))
            elif isinstance(value, Tensor) and value is not before.get(key):
                stand_in.__dict__[key] = closing.of(value)


def _never(*_: Any) -> Any:
    raise AssertionError("no call of these clones is answered")


def _filled(parameter: Tensor | None) -> Tensor | None:
    if parameter is None or parameter.device.type != "meta":
        return parameter
    return nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)


def _copied(buffer: Tensor | None) -> Tensor | None:
    if buffer is None or buffer.device.type == "meta":
        return _filled(buffer)
    return buffer.detach().clone()


def _varied(numbers: Tensor, variant: int) -> Tensor:
    factor, more = ((1, 0), (-1, 0), (-3, -1), (5, 2))[variant]
    return numbers * factor + more


def _made_up(tensor: Tensor, variant: int) -> Tensor:
    """Small numbers that differ, class 0, or a mask of ones: valid wherever a model may look."""
    if not isinstance(tensor, Placeholder):
        return _varied(tensor.detach(), variant) if variant and tensor.is_floating_point() else tensor
    if tensor.is_floating_point() or tensor.is_complex():
        # Not by chance: this runs where draws are those of a unit.
        made = (
            torch.arange(tensor.numel(), dtype=torch.float32, device=tensor.device)
            .sin_()
            .reshape(tensor.shape)
            .to(tensor.dtype)
        )
        made = _varied(made, variant)
    else:
        made = (torch.ones if tensor.dtype == torch.bool else torch.zeros)(
            tensor.shape, dtype=tensor.dtype, device=tensor.device
        )
    return made.requires_grad_(tensor.requires_grad) * 1 if tensor.requires_grad else made
