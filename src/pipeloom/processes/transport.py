"""Ranks that are processes: a header says what comes, small tensors come with it, large ones over torch.distributed.

gloo and NCCL want to know a size before they receive, and neither can be asked whether something came, or told to
stop waiting. So each message begins with a header on the connections of `pipeloom.peers`, which can: from then on no
receive can be of a wrong size. What is small and in the processor's memory comes with it. The rest is received by a
thread per channel (contract 19), which may block, because the rank itself waits on a queue that failures wake too.
"""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch import Tensor

from pipeloom.errors import BatchError, ProcessError
from pipeloom.ir import Action, Kind, Schedule
from pipeloom.ir.relations import counterpart
from pipeloom.peers import Cause, Failures, Mesh, Overdue, Patience
from pipeloom.processes.lanes import Lanes
from pipeloom.processes.wire import packed, unpacked
from pipeloom.runtime.boundary import Gradients, Message

MESSAGE_KIND = 16
_HEADER = struct.Struct("<QIIHII")
"""The call's three numbers, the length of the key, the number of the description and the length of its text."""
_MAX_DESCRIPTIONS = 256


class Call(NamedTuple):
    """Which call of the pipeline a message belongs to, to be compared between ranks.

    Args:
        number: calls of this pipeline so far.
        schedule: a checksum of what is run.
        inputs: a checksum of the batch.
    """

    number: int
    schedule: int
    inputs: int


class Parcel(NamedTuple):
    """Leaves on their way, and what makes a message of them."""

    leaves: tuple[Any, ...]
    make: Any


class _Arrival(NamedTuple):
    sender: int
    call: Call
    key: bytes
    content: Any


class Waiting(NamedTuple):
    """What a rank waits for, for reports."""

    what: str
    peer: int
    since_s: float


class DistributedTransport:
    """This rank's ends of all channels.

    Args:
        mesh: connections to the other ranks, not yet started.
        lanes: carry what does not fit into a header.
        failures: end a wait.
        limit_s: how long a message may be waited for.
        stalled: told when it took longer: gives the cause.

    Attributes:
        waiting: what is waited for right now.
        last_heard: per rank, the last receive that it sent for.
        peak_live_slots: of this call, the most receives that were posted and not yet taken.
    """

    def __init__(
        self, mesh: Mesh, lanes: Lanes, failures: Failures, limit_s: float, stalled: Callable[[Waiting], Cause]
    ) -> None:
        self._mesh = mesh
        self._lanes = lanes
        self._failures = failures
        self._limit_s = limit_s
        self._stalled = stalled
        self._queue: SimpleQueue[_Arrival | None] = SimpleQueue()
        self._arrived: dict[tuple[int, bytes], Any] = {}
        self._sent: dict[int, dict[bytes, int]] = {}
        self._known: dict[int, dict[int, Any]] = {}
        self._call = Call(0, 0, 0)
        self._schedule: Schedule | None = None
        self._shapes: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._num_live_slots = self.peak_live_slots = 0
        self.waiting: Waiting | None = None
        self.last_heard: dict[int, str] = {}
        mesh.on(MESSAGE_KIND, self._received)
        failures.on_failure(self._wake)

    def begin(self, schedule: Schedule, call: Call) -> None:
        """Start a call: what is left of earlier ones is dropped."""
        self._schedule, self._call = schedule, call
        self._arrived.clear()
        self._shapes.clear()
        self._num_live_slots = self.peak_live_slots = 0

    def send(self, action: Action, message: Message | Gradients) -> None:
        """Post what the stage made; never waits.

        Raises:
            BatchError: a leaf can't be sent, or a gradient is not like what it is the gradient of.
        """
        receive = counterpart(action)
        if isinstance(message, Gradients):
            self._check_gradients(action, message)
            parcel = Parcel(message.leaves, (Kind.SEND_B, message.is_apart))
        else:
            parcel = Parcel(message.leaves, (Kind.SEND_F, message.skeleton(), message.needs_grad))
        self.give(self._rank_of(receive), str(receive).encode(), parcel)

    def post(self, action: Action) -> None:
        """Count a slot: live from here until the message is taken."""
        del action
        self._num_live_slots += 1
        self.peak_live_slots = max(self.peak_live_slots, self._num_live_slots)

    def take(self, action: Action) -> Message | Gradients:
        """Wait for a message; those that come before it are kept for their own consumers.

        Raises:
            PeerFailed: another rank failed, has ended, or did not send it within the limit.
            ProcessError: the sender does not run the same call.
        """
        sender = self._rank_of(counterpart(action))
        leaves, make = self.get(sender, str(action).encode())
        self._num_live_slots -= 1
        if make[0] is Kind.SEND_B:
            return Gradients(leaves, make[1])
        self._shapes[action.stage, action.microbatch] = leaves
        return Message.rebuilt(leaves, *make[1:])

    def give(self, peer: int, key: bytes, parcel: Parcel) -> None:
        """Post leaves for another rank under a key."""
        description, memory = packed(parcel.leaves)
        inline, rest = self._lanes.divided(peer, description.stretches, memory)
        number, text = self._numbered(peer, pickle.dumps((description, parcel.make)))
        self._lanes.send(peer, rest)
        header = _HEADER.pack(*self._call, len(key), number, len(text))
        self._mesh.send(peer, MESSAGE_KIND, header, key, text, *map(_buffer, inline))

    def get(self, peer: int, key: bytes) -> Parcel:
        """Wait for leaves of another rank; raises as `take` does."""
        found = (peer, key)
        if found not in self._arrived:
            self._wait(found, Waiting(key.decode(), peer, time.monotonic()))
        description, make, memory, works = self._arrived.pop(found)
        for work in works:
            work.wait()
        return Parcel(unpacked(description, memory), make)

    def settle(self) -> None:
        """After all ranks took what was sent: let go of the memory."""
        self._lanes.settle()

    def _wait(self, wanted: tuple[int, bytes], waiting: Waiting) -> None:
        self.waiting = waiting
        patience = Patience(self._limit_s)
        while wanted not in self._arrived:
            if self._queue.empty():  # what a rank sent before it failed or ended still counts
                self._failures.expect({waiting.peer}, waiting.what)
            try:
                self._sort(patience.take(self._queue))
            except Overdue:
                self._failures.tell(self._stalled(waiting))
                self._failures.check()
                raise
        self.waiting = None

    def _sort(self, arrival: _Arrival | None) -> None:
        if arrival is None or arrival.call.number < self._call.number:
            return
        if arrival.call != self._call:
            raise _out_of_step(arrival, self._call)
        self._arrived[arrival.sender, arrival.key] = arrival.content
        self.last_heard[arrival.sender] = arrival.key.decode()

    def _wake(self) -> None:
        self._queue.put(None)

    def _numbered(self, peer: int, text: bytes) -> tuple[int, bytes]:
        """The number of a description on a channel, and its text if that is new there.

        Number 0 after others starts the numbering again: values that change with each micro-batch shall not pile up.
        """
        sent = self._sent.setdefault(peer, {})
        if text in sent:
            return sent[text], b""
        if len(sent) == _MAX_DESCRIPTIONS:
            sent.clear()
        sent[text] = len(sent)
        return sent[text], text

    def _received(self, sender: int, body: memoryview) -> None:
        """In the thread of the connections: what came whole goes to the rank, what misses tensors to its lane."""
        *call, key_size, number, text_size = _HEADER.unpack_from(body)
        middle = _HEADER.size + key_size
        key, end = bytes(body[_HEADER.size : middle]), middle + text_size
        known = self._known.setdefault(sender, {})
        if text_size:
            known[number] = pickle.loads(body[middle:end])
        description, make = known[number]
        arrival = _Arrival(sender, Call(*call), key, None)
        self._lanes.receive(
            sender,
            description,
            body[end:],
            lambda memory, works: self._queue.put(arrival._replace(content=(description, make, memory, works))),
        )

    def _check_gradients(self, action: Action, gradients: Gradients) -> None:
        values = self._shapes.pop((action.stage, action.microbatch))
        for leaf, (value, grad) in enumerate(zip(values, gradients.leaves, strict=True)):
            if grad is not None and (grad.shape != value.shape or grad.dtype != value.dtype):
                raise BatchError(
                    f"the gradient of leaf {leaf} of what stage {action.stage} received is "
                    f"{grad.dtype}{tuple(grad.shape)}, but the leaf is {value.dtype}{tuple(value.shape)}; it was not "
                    "sent",
                    "look for a hook or an autograd.Function in that stage that returns another gradient",
                )

    def _rank_of(self, action: Action) -> int:
        assert self._schedule is not None, "`begin` comes first"
        return self._schedule.rank_of(action.stage)


def _buffer(memory: Tensor) -> memoryview:
    return memoryview(memory.numpy())  # type: ignore[arg-type]  # numpy's stubs before Python 3.12 lack the protocol


def _out_of_step(arrival: _Arrival, own: Call) -> ProcessError:
    theirs, rank = arrival.call, arrival.sender
    if theirs.number != own.number:
        what = f"rank {rank} is at call {theirs.number} of the pipeline, this rank at call {own.number}"
    elif theirs.schedule != own.schedule:
        what = f"rank {rank} runs another schedule in call {own.number} than this rank"
    else:
        what = f"rank {rank} was given another batch in call {own.number} than this rank"
    return ProcessError(
        f"{what}; all ranks of a pipeline make the same calls with the same inputs",
        "let every process read the same batches in the same order, with the same seed",
    )
