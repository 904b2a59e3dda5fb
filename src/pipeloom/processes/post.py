"""Leaves on their way from one rank to another, under a key.

gloo and NCCL want to know a size before they receive, and neither can be asked whether something came, or told to stop
waiting. So each parcel begins with a header on a connection of our own, which can: from then on no receive can be
of a wrong size. What is small and in the processor's memory comes with it. The rest is received by a thread per
channel (contract 19), which may block, because the rank itself waits where failures wake it too.

What describes the leaves is sent when it is new on a way, and called by its number from then on: no extra pass with
made-up inputs, and a shape may change whenever the model likes.
"""

from __future__ import annotations

import pickle
import struct
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import ProcessError
from pipeloom.peers import Cause, Failures, Mesh, Overdue, Patience
from pipeloom.processes.direct import Direct
from pipeloom.processes.lanes import Lanes
from pipeloom.processes.wire import CACHE_LINE, Description, Plain, packed, unpacked

MESSAGE_KIND = 16
_HEADER = struct.Struct("<QIIHII")
"""The call's three numbers, the length of the key, the number of the description and the length of its text."""
_SMALL_BYTES = 1 << 14
_MAX_DESCRIPTIONS = 256


class Call(NamedTuple):
    """Which call of the pipeline a message belongs to, to be compared between ranks.

    Args:
        number: calls of this pipeline so far.
        schedule: a checksum of what is run: schedule, seed, step.
        inputs: a checksum of the batch.
    """

    number: int
    schedule: int
    inputs: int


class Parcel(NamedTuple):
    """Leaves on their way.

    Args:
        leaves: tensors and plain values.
        form: what makes something of them; can be pickled.
    """

    leaves: tuple[Any, ...]
    form: Any


class Waiting(NamedTuple):
    """What a rank waits for, for reports."""

    what: str
    peer: int
    since_s: float


class _Known:
    """A description that came over a way."""

    __slots__ = ("description", "form", "only")

    def __init__(self, description: Description, form: Any) -> None:
        self.description = description
        self.form = form
        self.only = _only(description)


class _Way:
    """The descriptions that one rank has sent to another over one kind of connection."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.short: dict[Hashable, int] = {}

    def numbered(self, text: bytes) -> tuple[int, bytes]:
        """The number of a description, and its text if that is new; old ones are forgotten, not piled up."""
        if text in self._numbers:
            return self._numbers[text], b""
        if len(self._numbers) == _MAX_DESCRIPTIONS:
            self._numbers.clear()
            self.short.clear()
        self._numbers[text] = len(self._numbers)
        return self._numbers[text], text


class _Arrival(NamedTuple):
    sender: int
    call: Call
    key: bytes
    content: Any


class Post:
    """This rank's ends of all ways to others.

    Args:
        mesh: connections that a thread reads, not yet started.
        direct: makes connections that this rank reads itself, from what receives.
        lanes: carry what is large.
        failures: end a wait.
        limit_s: how long a parcel may be waited for.
        stalled: told when it took longer: gives the cause.

    Attributes:
        call: which one this is; what is left of earlier ones is dropped.
        waiting: what is waited for right now.
        last_heard: per rank, the key that last came from it.
    """

    def __init__(
        self,
        mesh: Mesh,
        direct: Callable[[Callable[[int, memoryview], None]], Direct],
        lanes: Lanes,
        failures: Failures,
        limit_s: float,
        stalled: Callable[[Waiting], Cause],
    ) -> None:
        self._mesh, self._lanes, self._failures = mesh, lanes, failures
        self._limit_s, self._stalled = limit_s, stalled
        self._direct = direct(self._received_small)
        self._arrived: dict[tuple[int, bytes], Any] = {}
        self._come: deque[_Arrival] = deque()
        self._ways: dict[tuple[int, bool], _Way] = {}
        self._known: dict[tuple[int, bool, int], _Known] = {}
        self.call = Call(0, 0, 0)
        self.waiting: Waiting | None = None
        self.last_heard: dict[int, bytes] = {}
        mesh.on(MESSAGE_KIND, self._received_large)
        failures.on_failure(self._direct.wake)

    def begin(self, call: Call) -> None:
        """Start a call: what is left of earlier ones is dropped."""
        self.call = call
        self._arrived.clear()

    def give(self, peer: int, key: bytes, parcel: Parcel) -> None:
        """Post a parcel; never waits."""
        short = _short(parcel)
        if short is not None:
            way = self._way(peer, is_small=True)
            number = way.short.get(short)
            if number is not None:
                header = _HEADER.pack(*self.call, len(key), number, 0)
                self._direct.send(peer, header, key, _buffer(parcel.leaves[0]))
                return
        self._give(peer, key, parcel, short)

    def get(self, peer: int, key: bytes) -> Parcel:
        """Wait for a parcel.

        Raises:
            PeerFailed: another rank failed, has ended, or did not send it within the limit.
            ProcessError: the sender does not run the same call.
        """
        wanted = (peer, key)
        if wanted not in self._arrived:
            self._wait(wanted, Waiting(key.decode(), peer, time.monotonic()))
        known, memory, works = self._arrived.pop(wanted)
        for work in works:
            work.wait()
        leaves = (memory,) if known.only else unpacked(known.description, memory)
        return Parcel(leaves, known.form)

    def settle(self) -> None:
        """After all ranks took what was sent: let go of the memory."""
        self._lanes.settle()

    def close(self) -> None:
        """Close the connections that are this rank's to read."""
        self._direct.close()

    def _give(self, peer: int, key: bytes, parcel: Parcel, short: Hashable) -> None:
        description, memory = packed(parcel.leaves)
        inline, rest = self._lanes.divided(peer, description.stretches, memory)
        is_small = not rest and sum(part.numel() for part in inline) <= _SMALL_BYTES
        way = self._way(peer, is_small=is_small)
        number, text = way.numbered(pickle.dumps((description, parcel.form)))
        if short is not None and is_small:
            way.short[short] = number
        self._lanes.send(peer, rest)
        header = _HEADER.pack(*self.call, len(key), number, len(text))
        parts: list[bytes | memoryview] = [header, key, text, *map(_buffer, inline)]
        if is_small:
            self._direct.send(peer, *parts)
        else:
            self._mesh.send(peer, MESSAGE_KIND, *parts)

    def _way(self, peer: int, *, is_small: bool) -> _Way:
        found = self._ways.get((peer, is_small))
        if found is None:
            found = self._ways[peer, is_small] = _Way()
        return found

    def _wait(self, wanted: tuple[int, bytes], waiting: Waiting) -> None:
        self.waiting = waiting
        patience = Patience(self._limit_s)
        while self._sort_all() and wanted not in self._arrived:
            if not self._direct.wait(0.0) and not self._come:  # what a rank sent before it ended still counts
                self._failures.expect({waiting.peer}, waiting.what)
                try:
                    patience.spend(self._direct.wait)
                except Overdue:
                    self._failures.tell(self._stalled(waiting))
                    self._failures.check()
                    raise
        self.waiting = None

    def _sort_all(self) -> bool:
        while self._come:
            arrival = self._come.popleft()
            if arrival.call.number < self.call.number:
                continue
            if arrival.call != self.call:
                raise _out_of_step(arrival, self.call)
            self._arrived[arrival.sender, arrival.key] = arrival.content
            self.last_heard[arrival.sender] = arrival.key
        return True

    def _received_small(self, sender: int, body: memoryview) -> None:
        """In the thread of this rank."""
        known, arrival, end = self._opened(sender, body, is_small=True)
        if known.only is not None:
            shape, dtype = known.only
            room = torch.empty(shape, dtype=dtype)  # memory of a message lies anywhere within a cache line
            content = (known, room.copy_(torch.frombuffer(body, dtype=dtype, offset=end).view(shape)), ())
            self._come.append(arrival._replace(content=content))
        else:
            self._lanes.receive(sender, known.description, body[end:], self._delivery(arrival, known))

    def _received_large(self, sender: int, body: memoryview) -> None:
        """In the thread of the mesh."""
        known, arrival, end = self._opened(sender, body, is_small=False)
        self._lanes.receive(sender, known.description, body[end:], self._delivery(arrival, known))

    def _opened(self, sender: int, body: memoryview, *, is_small: bool) -> tuple[_Known, _Arrival, int]:
        call, schedule, inputs, key_size, number, text_size = _HEADER.unpack_from(body)
        middle = _HEADER.size + key_size
        end = middle + text_size
        if text_size:
            self._known[sender, is_small, number] = _Known(*pickle.loads(body[middle:end]))
        known = self._known[sender, is_small, number]
        return known, _Arrival(sender, Call(call, schedule, inputs), bytes(body[_HEADER.size : middle]), None), end

    def _delivery(self, arrival: _Arrival, known: _Known) -> Callable[[Any, Any], None]:
        def deliver(memory: Any, works: Any) -> None:
            if known.only is not None:
                (memory,) = unpacked(known.description, memory)
            self._come.append(arrival._replace(content=(known, memory, works)))
            self._direct.wake()

        return deliver


def _short(parcel: Parcel) -> Hashable:
    """What says all of a parcel that is one small tensor, alone in its memory; None for other parcels."""
    if len(parcel.leaves) != 1 or type(leaf := parcel.leaves[0]) is not Tensor:
        return None
    is_plain = leaf.layout is torch.strided and leaf.is_cpu and leaf.is_contiguous() and not leaf.is_quantized
    if not is_plain or leaf.is_conj() or leaf.is_neg() or not 0 < leaf.nbytes <= _SMALL_BYTES:
        return None
    return None if leaf.data_ptr() % CACHE_LINE else (leaf.shape, leaf.dtype, parcel.form)


def _only(description: Description) -> tuple[tuple[int, ...], torch.dtype] | None:
    """The shape and dtype of the one tensor that fills its memory, if that is all there is."""
    if len(description.distinct) != 1 or len(description.places) != 1 or isinstance(description.distinct[0], Plain):
        return None
    lying, stretch = description.distinct[0], description.stretches[0]
    meant = torch.empty(lying.shape, dtype=lying.dtype, device="meta")
    is_whole = lying.strides == meant.stride() and stretch.num_bytes == stretch.extent_bytes == meant.nbytes
    return (lying.shape, lying.dtype) if is_whole and stretch.phase == 0 and stretch.num_bytes else None


def _buffer(memory: Tensor) -> memoryview:
    flat = memory if memory.dtype is torch.uint8 else memory.detach().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's stubs before Python 3.12 lack the protocol


def _out_of_step(arrival: _Arrival, own: Call) -> ProcessError:
    theirs, rank = arrival.call, arrival.sender
    if theirs.number != own.number:
        what = f"rank {rank} is at call {theirs.number} of the pipeline, this rank at call {own.number}"
    elif theirs.schedule != own.schedule:
        what = f"rank {rank} runs another schedule, seed or step in call {own.number} than this rank"
    else:
        what = f"rank {rank} was given another batch in call {own.number} than this rank"
    return ProcessError(
        f"{what}; all ranks of a pipeline make the same calls with the same inputs",
        "let every process read the same batches in the same order, with the same seed",
    )
