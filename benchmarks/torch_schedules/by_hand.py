"""The least that a rank can do with torch and nothing else: detach, backward, and bytes on a socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.devices.threads import Work
from pipeloom.ir import Action, Schedule
from pipeloom.ir.relations import waits_for

_MESSAGE = struct.Struct("<If")
"""The number of the action whose value it is, and the value: stages that wait pass on one number."""


class HandMade:
    """One rank's program, walked as a loop written for it would.

    Args:
        schedule: computations only; one replica.
        rank: this one.
        peers: a connection to each other rank.
        work: what an action does with the values of other stages that it waits for.
    """

    def __init__(self, schedule: Schedule, rank: int, peers: Mapping[int, socket.socket], work: Work) -> None:
        self._work, self._peers = work, peers
        numbers = {action: number for number, action in enumerate(schedule)}
        rank_of = {action: schedule.rank_of(action.stage, action.microbatch) for action in schedule}
        sources = {
            action: [need for need in waits_for(action, schedule) if need.stage != action.stage] for action in schedule
        }
        readers: dict[Action, set[int]] = {action: set() for action in schedule}
        for action, needs in sources.items():
            for need in needs:
                readers[need].add(rank_of[action])
        self._program = [
            (action, numbers[action], [(numbers[need], rank_of[need]) for need in sources[action]],
             readers[action] - {rank})
            for action in schedule.program(rank)
        ]  # fmt: skip
        self._arrived: dict[int, Any] = {}

    def step(self) -> None:
        """One batch."""
        arrived, work, peers = self._arrived, self._work, self._peers
        arrived.clear()
        for action, number, needs, readers in self._program:
            given = [arrived[need] if need in arrived else self._awaited(need, source) for need, source in needs]
            arrived[number] = value = work(action, given)
            for reader in readers:
                peers[reader].sendall(_MESSAGE.pack(number, value.item()))

    def close(self) -> None:
        """Close the connections."""
        for each in self._peers.values():
            each.close()

    def _awaited(self, wanted: int, source: int) -> Tensor:
        receive = partial(self._peers[source].recv, _MESSAGE.size, socket.MSG_WAITALL)
        while True:
            if not (message := receive()):
                raise ConnectionError(f"rank {source} is gone")
            number, value = _MESSAGE.unpack(message)
            self._arrived[number] = torch.tensor([[value]])
            if number == wanted:
                return self._arrived[number]


def connected(rank: int, num_ranks: int) -> dict[int, socket.socket]:
    """A connection to each other rank, on this machine; all ranks call it."""
    peers: dict[int, socket.socket] = {}
    with socket.create_server(("127.0.0.1", 0), backlog=num_ranks) as server:
        ports: list[Any] = [None] * num_ranks
        dist.all_gather_object(ports, server.getsockname()[1])
        for other in range(rank):
            peers[other] = socket.create_connection(("127.0.0.1", ports[other]))
            peers[other].sendall(struct.pack("<I", rank))
        for _ in range(rank + 1, num_ranks):
            accepted, _ = server.accept()
            peers[struct.unpack("<I", accepted.recv(4, socket.MSG_WAITALL))[0]] = accepted
    for each in peers.values():
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peers
