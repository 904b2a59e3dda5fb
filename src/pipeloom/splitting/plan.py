"""What the stages of a model do with one form of inputs."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property

from pipeloom.recording.ops import Recording
from pipeloom.splitting.dataflow import Flow, StageFlow


@dataclass(frozen=True)
class Plan:
    """What the stages do with one micro-batch."""

    recording: Recording
    flow: Flow

    def stage(self, stage: int) -> StageFlow:
        """What one of them does."""
        return self.flow.stages[stage]

    @cached_property
    def forward_links(self) -> frozenset[tuple[int, int]]:
        """The pairs of stages between which a value travels, that are no neighbours."""
        return frozenset(self.flow.forward_links)

    @cached_property
    def backward_links(self) -> frozenset[tuple[int, int]]:
        """The pairs of stages between which a gradient travels, that are no neighbours."""
        return frozenset(self.flow.backward_links)

    @cached_property
    def digest(self) -> int:
        """A checksum of the calls and of what crosses, which is alike in all processes."""
        calls = [(op.what, op.call, stage) for op, stage in zip(self.recording.ops, self.flow.stage_of, strict=True)]
        return zlib.crc32(repr((calls, self.flow.stages)).encode())
