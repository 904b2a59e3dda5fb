"""What the executor asks of a transport, by parcels between processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch

from pipeloom.batch.trees import Structure, flatten
from pipeloom.errors import BatchError
from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.relations import counterpart, destinations_of, sources_of
from pipeloom.processes.parcels import Parcel
from pipeloom.processes.post import Call, Post
from pipeloom.processes.wire import shapes
from pipeloom.runtime.boundary import Gradients, Message


class _ForwardForm:
    """Makes a message of leaves; each description of one is unpickled once, and so is this."""

    def __init__(self, skeleton: Any, needs_grad: tuple[bool, ...]) -> None:
        self.skeleton = skeleton
        self.needs_grad = needs_grad

    @cached_property
    def structure(self) -> Structure:
        return flatten(self.skeleton)[1]


_ONE_TENSOR = {needs_grad: _ForwardForm(0, (needs_grad,)) for needs_grad in (False, True)}


class _BackwardForm(NamedTuple):
    """Makes gradients of leaves."""

    is_apart: bool


_BACKWARD = {is_apart: _BackwardForm(is_apart) for is_apart in (False, True)}


class _Route(NamedTuple):
    peer: int
    key: bytes
    action: Action
    """Kept, so that no other gets its `id`."""


class DistributedTransport:
    """The transfers of one rank; `pipeloom.runtime.transport.Transport` says what its methods do.

    Args:
        post: carries parcels.

    Attributes:
        peak_live_slots: of this call, the most receives that were posted and not yet taken.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._routes: dict[int, _Route] = {}
        self._schedule: Schedule | None = None
        self._passing_back: frozenset[int] = frozenset()
        self._received: dict[tuple[int, int], list[Any]] = {}
        self._num_live_slots = self.peak_live_slots = 0

    def begin(self, schedule: Schedule, call: Call) -> None:
        """Start a call."""
        if schedule is not self._schedule:
            self._schedule, self._routes = schedule, {}
            self._passing_back = frozenset(_passing_back(schedule))
        self._received.clear()
        self._num_live_slots = self.peak_live_slots = 0
        self._post.begin(call)

    def send(self, action: Action, message: Message | Gradients) -> None:
        """Post what the stage made; never waits.

        Raises:
            BatchError: a leaf can't be sent, or a gradient is not like what it is the gradient of.
        """
        if isinstance(message, Gradients):
            self._check(action, message)
            form: Any = _BACKWARD[message.is_apart]
            is_usual = True
        elif message.structure.container is None:
            form, is_usual = _ONE_TENSOR[message.needs_grad[0]], True
        else:
            form, is_usual = _ForwardForm(message.skeleton(), message.needs_grad), False
        peer, key, _ = self._route(action)
        self._post.give(peer, key, Parcel(message.leaves, form, is_usual))

    def post(self, action: Action) -> None:
        """Count a slot: live from here until the message is taken."""
        del action
        self._num_live_slots += 1
        if self._num_live_slots > self.peak_live_slots:
            self.peak_live_slots = self._num_live_slots

    def take(self, action: Action) -> Message | Gradients:
        """Wait for a message; those that come before it are kept for their own consumers.

        Raises:
            PeerFailed: another rank failed, has ended, or did not send it within the limit.
            ProcessError: the sender does not run the same call.
        """
        peer, key, _ = self._route(action)
        leaves, form, _ = self._post.get(peer, key)
        self._num_live_slots -= 1
        if isinstance(form, _BackwardForm):
            return Gradients(leaves, form.is_apart)
        if any(form.needs_grad) and action.stage in self._passing_back:
            self._received[action.stage, action.microbatch] = shapes(leaves)
        return Message(leaves, form.structure, form.needs_grad)

    def _route(self, action: Action) -> _Route:
        """Where a transfer goes to or comes from, and the key of both its ends: the receive."""
        found = self._routes.get(id(action))  # an action is hashed in Python
        if found is None:
            assert self._schedule is not None, "`begin` comes first"
            other = counterpart(action)
            key = str(action if action.kind.is_recv else other).encode()
            found = self._routes[id(action)] = _Route(
                self._schedule.rank_of(other.stage, other.microbatch), key, action
            )
        return found

    def _check(self, action: Action, gradients: Gradients) -> None:
        meant = self._received.pop((action.stage, action.microbatch), None)
        if meant is None or len(meant) != len(gradients.leaves):  # values that need none have none
            return
        for leaf, (spec, grad) in enumerate(zip(meant, gradients.leaves, strict=True)):
            if grad is not None and spec != (grad.dtype, grad.shape):
                raise BatchError(
                    f"the gradient of leaf {leaf} of what stage {action.stage} received is "
                    f"{_spec(grad.dtype, grad.shape)}, but the leaf is {_spec(*spec)}; it was not sent",
                    "look for a hook or an autograd.Function in that stage that returns another gradient",
                )


def _passing_back(schedule: Schedule) -> Iterator[int]:
    """The stages whose gradients go back to where their values come from, leaf by leaf.

    With links, what a stage sends back to another may be of values that came from a third.
    """
    for stage in range(schedule.num_stages):
        ends = (stage, schedule.num_stages, schedule.links)
        sources, destinations = sources_of(Kind.FORWARD, *ends), destinations_of(Kind.BACKWARD, *ends)
        if sources == destinations and len(sources) == 1:
            yield stage


def _spec(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{tuple(shape)}"
