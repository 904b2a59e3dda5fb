"""How a stage module takes the container that the stage before returned.

Always unpacking, as torch.distributed.pipelining does, breaks a module that takes a pair or a batch's dict as one
argument; never unpacking breaks ``forward(self, hidden, mask)``. The signature tells which is meant.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from torch import nn

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a ``forward`` takes.

    Args:
        has_several: it takes more than one positional argument, so a tuple becomes its arguments.
        names: the parameters that a dict can fill.
        required: those that it has to fill.
        is_open: ``**kwargs`` takes any name.
    """

    has_several: bool = False
    names: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    is_open: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> Signature:
        """Read it; a module that has none (one that was scripted) takes one value."""
        original = getattr(module, "_orig_mod", module)  # torch.compile's wrapper takes (*args, **kwargs)
        try:
            parameters = inspect.signature(original.forward).parameters.values()
        except (TypeError, ValueError):
            return cls()
        by_position = [p for p in parameters if p.kind in _BY_POSITION]
        return cls(
            has_several=len(by_position) > 1 or any(p.kind is Parameter.VAR_POSITIONAL for p in parameters),
            names=frozenset(p.name for p in parameters if p.kind in _BY_NAME),
            required=frozenset(p.name for p in parameters if p.kind in _BY_NAME and p.default is Parameter.empty),
            is_open=any(p.kind is Parameter.VAR_KEYWORD for p in parameters),
        )

    def called(self, module: nn.Module, value: Any) -> Any:
        """Call the module with ``value``, unpacked if it is a container of its arguments."""
        if isinstance(value, tuple | list) and self.has_several:
            return module(*value)
        if isinstance(value, Mapping) and self._fits(value):
            return module(**value)
        return module(value)

    def _fits(self, value: Mapping[Any, Any]) -> bool:
        """Whether the keys are names of parameters; ``forward(self, batch)`` takes a dict whole, whatever its keys."""
        keys = value.keys()
        is_one = len(self.names) == 1 and self.required == self.names and not self.is_open
        are_known = self.is_open or keys <= self.names
        return not is_one and are_known and self.required <= keys and all(isinstance(key, str) for key in keys)
