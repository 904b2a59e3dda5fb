"""Ranks for tests: as threads of this process, and as processes that can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from pipeloom.peers import Collective, Ending, Failures, Mesh, Stalls, State

ROOT = Path(__file__).parents[2]
LONG_S = 60.0


class MemoryStore:
    """A store for ranks that are threads."""

    def __init__(self):
        self._values = {}
        self._changed = threading.Condition()

    def set(self, key, value):
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key):
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, LONG_S)
            return self._values[key]

    def check(self, keys):
        with self._changed:
            return all(key in self._values for key in keys)


class FolderStore:
    """A store for ranks that are processes: torch's would cost each of them the loading of torch."""

    def __init__(self, folder):
        self._folder = Path(folder)

    def set(self, key, value):
        path = self._path(key)
        part = path.with_suffix(".part")
        part.write_text(value)
        part.rename(path)

    def get(self, key):
        return self._path(key).read_bytes()

    def check(self, keys):
        return all(self._path(key).exists() for key in keys)

    def _path(self, key):
        return self._folder / key.replace("/", "_")


def together(*calls):
    """Run calls at the same time; return their results, or raise what the first one raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(call) for call in calls]
        return [each.result(LONG_S) for each in running]


def raised(call):
    """The exception that a call raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def until(is_so):
    """Wait until something is so, for a long time if need be."""
    end = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


@contextmanager
def meshes(num_ranks) -> Iterator[list[Mesh]]:
    """Connected, not started."""
    store = MemoryStore()
    ranks = range(num_ranks)
    made = together(*[lambda rank=rank: Mesh.connect(store, rank, num_ranks, timeout_s=LONG_S) for rank in ranks])
    try:
        yield made
    finally:
        for mesh in made:
            mesh.close()


class Rank:
    """All that a rank has of the room."""

    def __init__(self, mesh, limit_s=LONG_S):
        self.mesh = mesh
        self.failures = Failures(mesh, lambda rank: f"at the place of {rank}")
        self.collective = Collective(mesh, self.failures, limit_s)
        self.inbox = SimpleQueue()
        mesh.on(1, lambda peer, body: self.inbox.put((peer, bytes(body))))

    def take(self, num):
        """The next frames of kind 1."""
        return [self.inbox.get(timeout=LONG_S) for _ in range(num)]


@contextmanager
def ranks(num_ranks, limit_s=LONG_S) -> Iterator[list[Rank]]:
    """Connected and started, each in the hands of the test."""
    with meshes(num_ranks) as made:
        found = [Rank(mesh, limit_s) for mesh in made]
        for mesh in made:
            mesh.start()
        yield found


class Process(Rank):
    """A rank in a process of its own, as its program sees it."""

    def __init__(self):
        rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        super().__init__(Mesh.connect(FolderStore(folder), rank, num_ranks, timeout_s=LONG_S))
        self.rank = rank
        self.ending = Ending(self.mesh, self.failures)
        self.state = State(rank, f"the work of {rank}")
        self.stalls = Stalls(self.mesh, self.failures, lambda: self.state)
        self.mesh.start()

    def gather(self, what="a gather"):
        return self.collective.all_gather(b"", what)

    def ready(self):
        """All are there: tell the test."""
        self.gather("the start")
        sys.stdout.write("ready\n")
        sys.stdout.flush()


@dataclass
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str
    at_s: float

    @property
    def last_line(self):
        return self.err.rstrip().rpartition("\n")[2]


class Processes:
    """Processes that run the same program, with ``me`` as their rank.

    They write to files: a pipe would stay open in children that they leave behind.
    """

    def __init__(self, folder, num_ranks, program):
        self._folder = folder
        text = f"from tests.peers.ranks import *\nme = Process()\n{program}"
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        self._running = []
        for rank in range(num_ranks):
            command = [sys.executable, "-c", text, str(rank), str(num_ranks), str(folder)]
            with self._file("out", rank).open("w") as out, self._file("err", rank).open("w") as err:
                self._running.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err))

    def wait_until_ready(self):
        for rank in range(len(self._running)):
            until(lambda rank=rank: self._file("out", rank).read_text() == "ready\n")

    def signal(self, rank, number):
        os.kill(self._running[rank].pid, number)

    def ended(self, num_ranks=None) -> list[Ended]:
        """Wait for all of them, or the first ones."""
        return together(*[lambda rank=rank: self._end(rank) for rank in range(num_ranks or len(self._running))])

    def stop(self):
        for each in self._running:
            if each.poll() is None:
                each.send_signal(signal.SIGKILL)
                each.wait()

    def _end(self, rank):
        code = self._running[rank].wait(LONG_S)
        at_s = time.monotonic()
        return Ended(code, self._file("out", rank).read_text(), self._file("err", rank).read_text(), at_s)

    def _file(self, name, rank):
        return self._folder / f"{name}{rank}"


@contextmanager
def processes(folder, num_ranks, program) -> Iterator[Processes]:
    """Start processes; none of them outlives the test."""
    running = Processes(folder, num_ranks, program)
    try:
        yield running
    finally:
        running.stop()


def run(folder, num_ranks, program) -> list[Ended]:
    """Run a program on some ranks to its end."""
    with processes(folder, num_ranks, program) as running:
        return running.ended()
