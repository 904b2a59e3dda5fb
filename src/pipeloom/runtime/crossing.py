"""What crosses the cuts of a model that was cut by running it: values by name, between any two stages.

A stage of a chain takes what the one before returned. Here it takes several values from several stages, and what it
makes goes to several; the gradient of a value with several consumers comes back through all of them, the latest first,
each seeding its own backward with what it got (contract 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from pipeloom.batch.trees import LEAF, Structure, flatten
from pipeloom.ir import Kind, Links
from pipeloom.ir.relations import destinations_of, sources_of
from pipeloom.runtime.boundary import Gradients, Message


class StageFlow(Protocol):
    """What one stage has to do with a micro-batch; `pipeloom.splitting.dataflow.StageFlow` is one."""

    @property
    def receives(self) -> Mapping[int, Sequence[Any]]:
        """Per stage, the values that come from it."""

    @property
    def sends(self) -> Mapping[int, Sequence[Any]]:
        """Per stage, the values that go to it."""

    @property
    def seeds(self) -> Mapping[int, Sequence[Any]]:
        """Per later stage, the values whose gradients come from it."""

    @property
    def returns(self) -> Mapping[int, Sequence[Any]]:
        """Per earlier stage, the values whose gradients go to it."""

    @property
    def incoming(self) -> Sequence[Any]:
        """All values that come."""

    @property
    def outgoing(self) -> Sequence[Any]:
        """All values that go, each once."""


class Plan(Protocol):
    """What the stages do with one micro-batch."""

    def stage(self, stage: int) -> StageFlow:
        """What one of them does."""

    @property
    def forward_links(self) -> frozenset[tuple[int, int]]:
        """The pairs of stages between which a value travels, that are no neighbours."""

    @property
    def backward_links(self) -> frozenset[tuple[int, int]]:
        """The pairs of stages between which a gradient travels, that are no neighbours."""

    @property
    def digest(self) -> int:
        """A checksum of the calls and of what crosses, alike in all processes."""


class Outbox(dict[int, Any]):
    """What an action made for several stages: a message or gradients for each."""


class Routes:
    """Who takes what from whom, for the stages of one rank.

    Args:
        num_stages: of the whole model.
        links: of the schedule.
    """

    def __init__(self, num_stages: int, links: Links) -> None:
        self._num_stages = num_stages
        self._links = links

    def joined(self, stage: int, flow: StageFlow, given: Sequence[Any]) -> Message:
        """The values that came to a stage as one message, in the order of ``flow.incoming``."""
        messages = self._by_stage(Kind.FORWARD, stage, given)
        leaves: list[Any] = []
        needs_grad: list[bool] = []
        for source in sorted(flow.receives):
            leaves += messages[source].leaves
            needs_grad += messages[source].needs_grad
        return Message(tuple(leaves), _flat(len(leaves)), tuple(needs_grad))

    def parted(self, stage: int, flow: StageFlow, leaves: Sequence[Any], part: Callable[[Tensor], Tensor]) -> Outbox:
        """A message for every stage that takes values from this one; ``leaves`` are those of ``flow.outgoing``."""
        place = {value: i for i, value in enumerate(flow.outgoing)}
        box = Outbox()
        for to in destinations_of(Kind.FORWARD, stage, self._num_stages, self._links):
            own = [leaves[place[value]] for value in flow.sends.get(to, ())]
            parts = {id(each): part(each) for each in own if isinstance(each, Tensor)}
            sent = tuple([parts.get(id(each), each) for each in own])
            grads = tuple([isinstance(each, Tensor) and each.requires_grad for each in own])
            box[to] = Message(sent, _flat(len(own)), grads)
        return box

    def seeds(self, stage: int, flow: StageFlow, given: Sequence[Any]) -> tuple[dict[Any, Tensor | None], bool]:
        """Per value, the gradient that came back for it; and whether they are to be scaled later."""
        found: dict[Any, Tensor | None] = {}
        is_apart = False
        for source, gradients in self._by_stage(Kind.BACKWARD, stage, given).items():
            found.update(zip(flow.seeds.get(source, ()), gradients.leaves, strict=True))
            is_apart = is_apart or gradients.is_apart
        return found, is_apart

    def returned(self, stage: int, flow: StageFlow, grads: Sequence[Tensor | None], is_apart: bool) -> Outbox:
        """Gradients for every stage that waits for some; ``grads`` are those of ``flow.incoming``."""
        place = {value: i for i, value in enumerate(flow.incoming)}
        return Outbox(
            (to, Gradients(tuple([grads[place[value]] for value in flow.returns.get(to, ())]), is_apart))
            for to in destinations_of(Kind.BACKWARD, stage, self._num_stages, self._links)
        )

    def _by_stage(self, kind: Kind, stage: int, given: Sequence[Any]) -> dict[int, Any]:
        sources = sources_of(kind, stage, self._num_stages, self._links)
        opened = [each[stage] if isinstance(each, Outbox) else each for each in given]
        return dict(zip(sources, opened, strict=True))


@cache
def _flat(num_leaves: int) -> Structure:
    return LEAF if num_leaves == 1 else flatten(tuple(range(num_leaves)))[1]
