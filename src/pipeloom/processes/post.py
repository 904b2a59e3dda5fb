"""Leaves on their way from one rank to another, under a key.

gloo and NCCL want to know a size before they receive, and neither can be asked whether something came, or told to stop
waiting. So each parcel begins with a header on a connection of our own, which can: from then on no receive can be
of a wrong size. What is small and in the processor's memory comes with it. The rest is received by a thread per
channel (contract 19), which may block, because the rank itself waits where failures wake it too.

What describes the leaves is sent when it is new on a way, and called by its number from then on: no extra pass with
made-up inputs, and a shape may change whenever the model likes.
"""

from __future__ import annotations

import ctypes
import pickle
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import ProcessError, RuntimeStateError
from pipeloom.peers import Cause, Failures, Mesh, Overdue, Patience
from pipeloom.processes.direct import Direct
from pipeloom.processes.lanes import Lanes
from pipeloom.processes.parcels import SMALL_BYTES, Known, Parcel, Way, pickled, short_of
from pipeloom.processes.wire import packed, unpacked

MESSAGE_KIND = 16
_CALL = struct.Struct("<QII")
_HEADER = struct.Struct(f"<{_CALL.size}sHII")
"""The call's three numbers, the length of the key, the number of the description and the length of its text."""
_UNTIL_NEWS_S = 0.3
_WORDS = (1 << 32) - 1
"""Stands where the number of a description does in a message of plain bytes."""


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


class Waiting(NamedTuple):
    """What a rank waits for, for reports."""

    key: bytes
    peer: int
    since_s: float

    @property
    def what(self) -> str:
        """The name of what is waited for."""
        return self.key.decode()


class _Arrival(NamedTuple):
    """A message that is not of the call that runs, or came in another thread."""

    sender: int
    call: Call
    key: bytes
    content: Any


class Post:
    """This rank's ends of all ways to others.

    Args:
        mesh: connections that a thread reads, not yet started.
        connections: to the other ranks, for this one to read itself.
        lanes: carry what is large.
        failures: end a wait.
        limit_s: how long a parcel may be waited for.
        stalled: told when it took longer: gives the cause.

    Attributes:
        call: which one this is; what is left of earlier ones is dropped.
        waiting: what is waited for right now.
        last_heard: per rank, the key that last came from it.
        look: called every 5 s of waiting, to see whether there is any hope; it may raise.
    """

    def __init__(
        self,
        mesh: Mesh,
        connections: Mapping[int, socket.socket],
        lanes: Lanes,
        failures: Failures,
        limit_s: float,
        stalled: Callable[[Waiting], Cause],
    ) -> None:
        self._mesh, self._lanes, self._failures = mesh, lanes, failures
        self._limit_s, self._stalled = limit_s, stalled
        self._direct = Direct(connections, self._received_small)
        self._arrived: dict[tuple[int, bytes], Any] = {}
        self._come: deque[_Arrival] = deque()
        self._early: list[_Arrival] = []
        self._ways: dict[tuple[int, bool], Way] = {}
        self._known: dict[tuple[int, bool, int], Known] = {}
        self.call, self._packed_call = Call(0, 0, 0), _CALL.pack(0, 0, 0)
        self._is_running = self._is_torn = False
        self.look: Callable[[], None] | None = None
        self.waiting: Waiting | None = None
        self.last_heard: dict[int, bytes] = {}
        mesh.on(MESSAGE_KIND, self._received_large)
        failures.on_failure(self._direct.wake)

    def begin(self, call: Call) -> None:
        """Start a call: what is left of earlier ones is dropped."""
        self.call, self._packed_call = call, _CALL.pack(*call)
        self._arrived.clear()
        self._come.extend(self._early)
        self._early.clear()
        self._is_running = True

    def end(self) -> None:
        """All that the call itself sends and receives is done: others may begin the next one before this rank does."""
        self._is_running = False

    def give(self, peer: int, key: bytes, parcel: Parcel, *, is_direct: bool = True) -> None:
        """Post a parcel; never waits.

        Args:
            peer: the rank that gets it.
            key: under which.
            parcel: what it gets.
            is_direct: this rank will wait again in this call, and so send what the connection does not take at once.

        Raises:
            BatchError: a leaf, or the form, can't be sent.
            RuntimeStateError: an earlier one was interrupted half-way.
        """
        if self._is_torn:
            raise RuntimeStateError(
                "an earlier transfer was interrupted in the middle, and what followed it would be taken for its rest",
                "make a new pipeline, in all processes",
            )
        short = short_of(parcel) if is_direct and parcel.is_usual else None
        number = None if short is None else self._way(peer, is_small=True).short.get(short)
        if number is None:
            self._give(peer, key, parcel, short, is_direct)
            return
        leaf = parcel.leaves[0]
        header = _HEADER.pack(self._packed_call, len(key), number, 0)
        self._direct.send(peer, b"".join((header, key, ctypes.string_at(leaf.data_ptr(), leaf.nbytes))))

    def get(self, peer: int, key: bytes) -> Parcel:
        """Wait for a parcel.

        Raises:
            PeerFailed: another rank failed, has ended, or did not send it within the limit.
            ProcessError: the sender does not run the same call.
        """
        known, memory, works = self._arrived.pop((peer, key), None) or self._awaited(peer, key)
        if isinstance(works, Exception):
            raise self._lane_failed(works) from works
        for work in works:
            work.wait()
        leaves = (memory,) if known.only else unpacked(known.description, memory)
        return Parcel(leaves, known.form)

    def tell(self, peer: int, key: bytes, words: bytes) -> None:
        """Post some bytes; never waits."""
        self._direct.send(peer, b"".join((_HEADER.pack(self._packed_call, len(key), _WORDS, 0), key, words)))

    def hear(self, peer: int, key: bytes) -> bytes:
        """Wait for what a rank tells; raises what `get` does."""
        words: bytes = (self._arrived.pop((peer, key), None) or self._awaited(peer, key))[1]
        return words

    def settle(self) -> None:
        """After all ranks took what was sent: let go of the memory.

        Raises:
            PeerFailed: one of them is gone.
            ProcessError: torch.distributed failed by itself.
        """
        try:
            self._lanes.settle()
        except RuntimeError as error:
            raise self._lane_failed(error) from error

    @property
    def is_busy(self) -> bool:
        """Whether something is under way to this rank or from it, so that there is hope.

        What came while it looked whether there is any, and so did not read, is: it may be what it waits for.
        """
        is_unread = self.waiting is not None and (bool(self._come) or self._direct.has_unread)
        return bool(self._direct.unsent) or self._lanes.is_busy or self._mesh.is_busy or is_unread

    def flush(self, what: str) -> None:
        """Wait until the connections have taken what was given: nobody sends it while this rank does something else.

        Raises:
            PeerFailed: another rank failed, or does not read.
        """
        if slow := self._direct.unsent:
            self._wait(lambda: not self._direct.unsent, Waiting(what.encode(), min(slow), time.monotonic()))

    def close(self) -> None:
        """Close the connections that are this rank's to read."""
        self._direct.close()

    def _lane_failed(self, error: Exception) -> ProcessError:
        time.sleep(_UNTIL_NEWS_S)
        self._failures.check()
        return ProcessError(
            f"torch.distributed failed to carry a tensor: {error}", "see what it says; start all processes again"
        )

    def _give(self, peer: int, key: bytes, parcel: Parcel, short: Hashable, is_direct: bool) -> None:
        description, memory = packed(parcel.leaves)
        text_in_full = pickled(description, parcel.form)
        inline, rest = self._lanes.divided(peer, description.stretches, memory)
        is_small = is_direct and not rest and sum(part.numel() for part in inline) <= SMALL_BYTES
        way = self._way(peer, is_small=is_small)
        self._is_torn = True  # unless all of the following is done: Ctrl-C may come between any two lines
        number, text = way.numbered(text_in_full)
        if short is not None and is_small:
            way.short[short] = number
        self._lanes.send(peer, rest)
        header = _HEADER.pack(self._packed_call, len(key), number, len(text))
        parts: list[bytes | memoryview] = [header, key, text, *map(_buffer, inline)]
        if is_small:
            self._direct.send(peer, b"".join(parts))
        else:
            self._mesh.send(peer, MESSAGE_KIND, *parts)
        self._is_torn = False

    def _way(self, peer: int, *, is_small: bool) -> Way:
        found = self._ways.get((peer, is_small))
        if found is None:
            found = self._ways[peer, is_small] = Way()
        return found

    def _awaited(self, peer: int, key: bytes) -> Any:
        if self._come:
            self._sort_all()
        wanted = (peer, key)
        if wanted not in self._arrived and not (self._direct.poll(peer) and wanted in self._arrived):
            self._wait(lambda: wanted in self._arrived, Waiting(key, peer, time.monotonic()))
        return self._arrived.pop(wanted)

    def _wait(self, is_over: Callable[[], bool], waiting: Waiting) -> None:
        self.waiting = waiting
        try:
            self._wait_until(is_over, waiting, Patience(self._limit_s, self.look))
        finally:
            self.waiting = None

    def _wait_until(self, is_over: Callable[[], bool], waiting: Waiting, patience: Patience) -> None:
        while not is_over():
            ended = self._failures.ended & {waiting.peer}  # before the look: what a rank sent before it ended counts
            if self._failures.is_quiet or not self._has_more():
                self._failures.expect(ended, waiting.what)
                try:
                    patience.spend(self._direct.wait)
                except Overdue:
                    self._failures.tell(self._stalled(waiting))
                    self._failures.check()
                    raise
            self._sort_all()

    def _has_more(self) -> bool:
        """Whether something came: what a rank sent before it failed or ended still counts."""
        return self._direct.wait(0.0) or bool(self._come)

    def _sort_all(self) -> None:
        while self._come:
            arrival = self._come.popleft()
            if arrival.call == self.call:
                self._note(arrival.sender, arrival.key, arrival.content)
            elif arrival.call.number > self.call.number and not self._is_running:
                self._early.append(arrival)
            elif arrival.call.number >= self.call.number:
                raise _out_of_step(arrival, self.call)

    def _note(self, sender: int, key: bytes, content: Any) -> None:
        self._arrived[sender, key] = content
        if b" " not in key:
            self.last_heard[sender] = key

    def _received_small(self, sender: int, body: memoryview) -> None:
        """In the thread of this rank."""
        known, call, key, end = self._opened(sender, body, is_small=True)
        if known is not None and known.only is None:
            self._lanes.receive(sender, known.description, body[end:], self._delivery(sender, call, key, known))
            return
        content = (known, bytes(body[end:]) if known is None else known.tensor(body, end), ())
        if call == self._packed_call:
            self._note(sender, key, content)
        else:
            self._come.append(_Arrival(sender, Call(*_CALL.unpack(call)), key, content))

    def _received_large(self, sender: int, body: memoryview) -> None:
        """In the thread of the mesh."""
        known, call, key, end = self._opened(sender, body, is_small=False)
        assert known is not None, "words go directly"
        self._lanes.receive(sender, known.description, body[end:], self._delivery(sender, call, key, known))

    def _opened(self, sender: int, body: memoryview, *, is_small: bool) -> tuple[Known | None, bytes, bytes, int]:
        call, key_size, number, text_size = _HEADER.unpack_from(body)
        middle = _HEADER.size + key_size
        end = middle + text_size
        if text_size:
            self._known[sender, is_small, number] = Known(*pickle.loads(body[middle:end]))
        known = None if number == _WORDS else self._known[sender, is_small, number]
        return known, call, bytes(body[_HEADER.size : middle]), end

    def _delivery(self, sender: int, call: bytes, key: bytes, known: Known) -> Callable[[Any, Any], None]:
        def deliver(memory: Any, works: Any) -> None:
            if known.only is not None and not isinstance(memory, Exception):
                (memory,) = unpacked(known.description, memory)
            arrival = _Arrival(sender, Call(*_CALL.unpack(call)), key, (known, memory, works))
            self._come.append(arrival)
            self._direct.wake()

        return deliver


def _buffer(memory: Tensor) -> memoryview:
    flat = memory if memory.dtype is torch.uint8 else memory.detach().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's stubs before Python 3.12 lack the protocol


def _out_of_step(arrival: _Arrival, own: Call) -> ProcessError:
    theirs, rank = arrival.call, arrival.sender
    if theirs.number != own.number:
        what = f"rank {rank} is at call {theirs.number} of the pipeline, this rank at call {own.number}"
    elif theirs.schedule != own.schedule:
        what = f"rank {rank} has another schedule, seed, step or form of inputs in call {own.number} than this rank"
    else:
        what = f"rank {rank} was given another batch in call {own.number} than this rank"
    return ProcessError(
        f"{what}; all ranks of a pipeline make the same calls with the same inputs",
        "let every process read the same batches in the same order, with the same seed",
    )
