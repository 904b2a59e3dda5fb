"""What carries large tensors between two processes: point-to-point operations of torch.distributed.

torch makes one communicator for both directions of a pair of ranks. On NCCL its operations run one after another, so
a receive that waits holds up the send that the other side waits for. Here each direction has a group of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.processes.wire import Description, Stretch, rooms

INLINE_BYTES = 1 << 16
"""Up to this a tensor travels with its header: two messages would take longer than the bytes [seen on loopback]."""

_UNTIL_NEWS_S = 1.0

Delivery = Callable[[Any, Any], None]
"""Gets the memory, and what still has to be waited for; or twice the error."""


class Lanes:
    """This rank's lanes to and from others.

    Args:
        backend: "gloo", or "nccl" for tensors on GPUs.
        ranks: the global rank of each rank of the pipeline.
        channels: the ordered pairs (sender, receiver) of the pipeline; all ranks give the same.
        rank: this one.
        device: where tensors that do not come from a processor's memory are received; None if there are none.
    """

    def __init__(
        self,
        backend: str,
        ranks: Sequence[int],
        channels: Iterable[tuple[int, int]],
        rank: int,
        device: torch.device | None,
    ) -> None:
        self._backend, self._ranks, self._rank = backend, ranks, rank
        self._channels = sorted(set(channels))
        self._device = device or torch.device("cpu")
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._groups: list[Any] = []

    def open(self) -> None:
        """Make the groups; every process of the world takes part in each, also those that are not in it."""
        for sender, receiver in self._channels:
            one, other = self._ranks[sender], self._ranks[receiver]
            group = dist.new_group([one, other], backend=self._backend)
            self._groups.append(group)
            if sender == self._rank:
                self._outgoing[receiver] = _Outgoing(group, other)
            if receiver == self._rank:
                self._incoming[sender] = _Incoming(group, one, waits_here=self._backend == "gloo")

    def divided(
        self, peer: int, stretches: Sequence[Stretch], memory: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The memory that goes to ``peer`` with the header, and that which does not."""
        has_lane = peer in self._outgoing
        inline: list[Tensor] = []
        rest: list[Tensor] = []
        for stretch, part in zip(stretches, memory, strict=True):
            (inline if self._is_inline(stretch, has_lane) else rest).append(part)
        return inline, rest

    def send(self, peer: int, parts: Sequence[Tensor]) -> None:
        """Post the large parts; never waits."""
        if parts:
            self._outgoing[peer].send(parts)

    def receive(self, peer: int, description: Description, inline: memoryview, deliver: Delivery) -> None:
        """Receive a message's memory, and deliver it: at once, or later in a thread of the lane."""
        memory = rooms(description, self._device)
        missing, start = [], 0
        for stretch, room in zip(description.stretches, memory, strict=True):
            if not self._is_inline(stretch, peer in self._incoming):
                missing.append(room)
            elif stretch.num_bytes:
                room.copy_(torch.frombuffer(inline, dtype=torch.uint8, count=stretch.num_bytes, offset=start))
                start += stretch.num_bytes
        if missing:
            self._incoming[peer].receive(
                missing, lambda works: deliver(works if isinstance(works, Exception) else memory, works)
            )
        else:
            deliver(memory, ())

    def settle(self) -> None:
        """Wait for what was sent; after all ranks have said that they took it, that does not wait."""
        for lane in self._outgoing.values():
            lane.settle()

    def close(self) -> None:
        """Give the groups up, unless a receive still waits in one: gloo can't be told to stop."""
        is_busy = self.is_busy
        for lane in self._incoming.values():
            lane.close()
        if not is_busy:
            for group in self._groups:
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    with contextlib.suppress(ValueError, AssertionError):  # the user has given up all groups before
                        dist.destroy_process_group(group)
        self._groups.clear()

    @property
    def is_busy(self) -> bool:
        """Whether something is being received."""
        return any(lane.num_begun != lane.num_over for lane in self._incoming.values())

    def _is_inline(self, stretch: Stretch, has_lane: bool) -> bool:
        return stretch.is_cpu and (stretch.num_bytes <= INLINE_BYTES or not has_lane or self._backend != "gloo")


class _Outgoing:
    def __init__(self, group: Any, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, parts: Sequence[Tensor]) -> None:
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        for part in parts:
            self._under_way.append((dist.isend(part, self._peer, self._group), part))

    def settle(self) -> None:
        while self._under_way:
            self._under_way[0][0].wait()
            self._under_way.popleft()


class _Incoming:
    """A thread that receives, because gloo's receives block; on a GPU they only have to be posted in order."""

    def __init__(self, group: Any, peer: int, *, waits_here: bool) -> None:
        self._group = group
        self._peer = peer
        self._waits_here = waits_here
        self._inbox: SimpleQueue[tuple[Sequence[Tensor], Callable[[Any], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.num_begun = self.num_over = 0  # one for each thread: nobody else adds to it

    def receive(self, parts: Sequence[Tensor], deliver: Callable[[Any], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"pipeloom-from-{self._peer}", daemon=True)
            self._thread.start()
        self.num_begun += 1
        self._inbox.put((parts, deliver))

    def close(self) -> None:
        """End the thread, once it has nothing to do."""
        self._inbox.put(None)

    def _work(self) -> None:
        while (order := self._inbox.get()) is not None:
            parts, deliver = order
            try:
                works: list[Any] = [dist.irecv(part, self._peer, self._group) for part in parts]
                if self._waits_here:
                    for work in works:
                        work.wait()
                    works = []
            except RuntimeError as error:
                time.sleep(_UNTIL_NEWS_S)  # if the sender is gone, its closed connection says so, and better
                deliver(error)
                return
            self.num_over += 1
            deliver(works)
            del order, parts, deliver, works
