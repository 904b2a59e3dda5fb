"""The tree of calls that a survey of a model finds."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn


@dataclass
class Node:
    """A call of a module, and the calls within it."""

    name: str
    module: nn.Module
    num_flops: int = 0
    children: list[Node] = field(default_factory=list)
    is_everywhere: bool = False

    @property
    def num_calls(self) -> int:
        """How many calls there are, with this one."""
        return 1 + sum(child.num_calls for child in self.children)
