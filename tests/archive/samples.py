"""Small checkpoints without torch, ranks that are threads or processes, and ways to do damage."""

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeloom.archive import durable
from pipeloom.archive.attempt import Attempt, begin
from pipeloom.archive.durable import json_bytes
from pipeloom.archive.group import ALONE, Group
from pipeloom.archive.manifest import (
    MANIFEST,
    MODEL_SHARD,
    OPTIMIZER_SHARD,
    Contents,
    FileRecord,
    Manifest,
    TensorRecord,
    _sealed,
    shard_of,
)
from pipeloom.archive.shard import Form, write_shard

FORM = Form("uint8", (64, 128))
"""Two pages."""


def content(step_index: int, stage: int) -> memoryview:
    return memoryview(bytes((7 * step_index + 3 * stage + place) % 251 for place in range(FORM.num_bytes)))


def write_stage(folder: Path, stage: int, step_index: int) -> Contents:
    """One tensor in each of the stage's files."""
    contents = Contents(stages={str(stage): [f"{stage}.weight"]}, values={"model": {}, "optimizer": {}})
    for suffix, name, records in (
        (MODEL_SHARD, f"{stage}.weight", contents.model),
        (OPTIMIZER_SHARD, f"exp_avg.{stage}.weight", contents.optimizer),
    ):
        file = shard_of(stage, suffix)
        metadata = {"stage": str(stage), "step_index": str(step_index)}
        contents.files[file] = FileRecord(
            *write_shard(folder / file, {name: (FORM, content(step_index, stage))}, metadata)
        )
        records[name] = TensorRecord(file, FORM.dtype, FORM.shape)
    return contents


def finish(attempt: Attempt, step_index: int, write: Callable[[Path, int, int], Contents] = write_stage) -> Path:
    layout = {"num_stages": len(attempt.stages), "num_ranks": 1, "schedule": "1f1b"}
    manifest = Manifest(step_index, layout, {"train": {"steps": 9}}, Contents())
    attempt.write(
        lambda folder, stage: write(folder, stage, step_index), manifest, {"step_index": step_index, "position": 24}
    )
    return attempt.target


def save(target: Path, step_index: int, stages: tuple[int, ...] = (0, 1), group: Group = ALONE, **limit: float) -> Path:
    return finish(begin(target, step_index, stages, group, **limit), step_index)


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and give it the checksum that fits: what an attacker, or another program, would write."""
    value = json.loads((folder / MANIFEST).read_bytes())
    change(value)
    value["checksum"] = "0" * 64
    (folder / MANIFEST).write_bytes(_sealed(json_bytes(value)))


def flip_bit(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def unsteady_disk(store: Path) -> Callable[[Path], None]:
    """A disk that flushes everything but the names in a folder."""

    def flush(path: Path) -> None:
        if path == store:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        durable.flush(path)

    return flush


class RankThread:
    """A rank among threads."""

    def __init__(self, rank: int, board: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.num_ranks = rank, len(board)
        self._board, self._barrier = board, barrier

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        self._board[self.rank] = payload
        self._barrier.wait(60)
        everyones = list(self._board)
        self._barrier.wait(60)
        return everyones


def run_ranks(num_ranks: int, function: Callable[[RankThread], Any]) -> list[Any]:
    """What each rank returns, or the exception that it raises."""
    board, barrier, outcomes = [b""] * num_ranks, threading.Barrier(num_ranks), [None] * num_ranks

    def run(rank: int) -> None:
        try:
            outcomes[rank] = function(RankThread(rank, board, barrier))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


class RankProcess:
    """A rank among processes, which hear each other through a folder."""

    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        self.rank, self.num_ranks, self._folder, self._calls = rank, num_ranks, folder, 0

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        self._calls += 1
        mine = self._folder / f"unnamed-{self.rank}"
        mine.write_bytes(payload)
        mine.rename(self._folder / f"call-{self._calls}-{self.rank}")
        paths = [self._folder / f"call-{self._calls}-{rank}" for rank in range(self.num_ranks)]
        while not all(path.exists() for path in paths):
            time.sleep(0.001)
        return [path.read_bytes() for path in paths]


def die_at(moment: int) -> None:
    """Kill this process as it brings the ``moment``-th thing to the disk; 0: never."""
    flushed = 0
    fsync = os.fsync

    def count(descriptor: int) -> None:
        nonlocal flushed
        flushed += 1
        if flushed == moment:
            os.kill(os.getpid(), 9)
        fsync(descriptor)

    os.fsync = count


def main() -> None:
    """``samples.py STORE STEP RANK NUM_RANKS MOMENT LIMIT_S``: save a step, be killed at a moment."""
    store, (step_index, rank, num_ranks, moment) = Path(sys.argv[1]), map(int, sys.argv[2:6])
    group = RankProcess(rank, num_ranks, store.parent)
    stages = (0, 1) if num_ranks == 1 else (rank,)
    die_at(moment)
    save(store / f"step-{step_index:06d}", step_index, stages, group, limit_s=float(sys.argv[6]))


if __name__ == "__main__":
    main()
