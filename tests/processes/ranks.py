"""Ranks as processes that can be hurt: started without a launcher, so that what ends them is Pipeloom alone.

They are forked from a server that has torch loaded: loading it costs seconds, for each rank of each test.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["torch.distributed", "torch._dynamo", "pipeloom.pipeline", "pipeloom.checkpoint", "tests.processes.ranks"]
)
LONG_S = 120.0
_CHANCE = random.SystemRandom()
"""Not `random`'s own numbers: what seeds those would give two tests that run at the same time the same port."""


@dataclass
class Ranks:
    """Processes that run one function.

    Args:
        processes: by rank.
        folder: holds what they print, and what they leave for the test.
    """

    processes: list[BaseProcess]
    folder: Path
    ended_s: float = 0.0

    def wait(self) -> list[int]:
        """Wait until all have ended; return their exit codes."""
        for process in self.processes:
            process.join(LONG_S)
            assert process.exitcode is not None, f"{process.name} has not ended; they say:\n{self._all_output()}"
        self.ended_s = time.monotonic()
        return [process.exitcode or 0 for process in self.processes]

    @property
    def seconds_to_end(self) -> float:
        """From the moment when a rank noted that it fails to the end of the last one."""
        return self.ended_s - float((self.folder / "fails").read_text())

    def last_lines(self, rank: int) -> list[str]:
        """What a rank printed, without empty lines."""
        return [line for line in self.output(rank).splitlines() if line.strip()]

    def output(self, rank: int) -> str:
        """All that a rank printed and complained."""
        return (self.folder / f"rank{rank}.txt").read_text(errors="replace")

    def _all_output(self) -> str:
        return "\n".join(self.output(rank) for rank in range(len(self.processes)))


def start(function: Callable[..., None], num_ranks: int, folder: Path, *args: object) -> Ranks:
    """Run ``function(*args)`` in ``num_ranks`` processes, as torchrun would; their output goes into ``folder``."""
    port = _free_port()
    ranks = Ranks([], folder)
    for rank in range(num_ranks):
        words = (rank, num_ranks, port, str(folder), function, args)
        process = _SERVER.Process(target=_rank, args=words, name=f"rank {rank}", daemon=True)
        process.start()
        ranks.processes.append(process)
    return ranks


def note_failure(folder: Path) -> None:
    """Write down when a rank fails, just before it does."""
    part = folder / f"fails.{os.getpid()}"
    part.write_text(str(time.monotonic()))
    part.rename(folder / "fails")


def _rank(rank: int, num_ranks: int, port: int, folder: str, function: Callable[..., None], args: tuple) -> None:
    here = os.open(f"{folder}/rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(here, 1)
    os.dup2(here, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.stdout.reconfigure(line_buffering=True)
    code = 1
    try:  # what the interpreter does with a script, and multiprocessing does not
        function(*args)
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _free_port() -> int:
    """Below those that the system hands out: one of them may be another process's before rank 0 listens on it."""
    while True:
        port = _CHANCE.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
