"""How soon all ranks know that one has died, and how soon all are gone.

    python -m benchmarks.deaths [--ranks 4] [--rounds 5] [--json]

Ranks are plain processes, without a launcher that would end them. In each round one of them raises, is killed, or is
sent SIGTERM, in the middle of its second step. *Said* is the moment when the last of the others has printed the
cause, *gone* the moment when the last process has ended; both count from the failure. Medians, and the worst.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

KINDS = ("raise", "kill", "terminate")
NUM_MICROBATCHES = 8
WIDTH = 64


def rank_main(kind: str) -> None:
    """One rank; rank 1 fails in the third backward of its second step, and says when."""
    import torch
    from torch import nn

    import pipeloom as pl

    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks)))
    num_calls = 0

    def fail(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls != NUM_MICROBATCHES + 3:
            return
        sys.stderr.write("FAILS\n")
        sys.stderr.flush()
        if kind == "raise":
            raise ValueError("a mistake")
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGTERM)

    if rank == 1:
        layers[1].register_full_backward_hook(fail)
    with pl.Pipeline(layers, num_stages=num_ranks, num_microbatches=NUM_MICROBATCHES, loss_fn=nn.MSELoss()) as pipe:
        for _ in range(1_000):
            pipe.step(torch.ones(16, WIDTH), target=torch.zeros(16, WIDTH))


def one_round(kind: str, num_ranks: int) -> tuple[float, float]:
    """Seconds until the others have printed the cause, and until all are gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = os.environ | {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "benchmarks.deaths", "--as-rank", kind]
    ranks = [
        subprocess.Popen(command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(num_ranks)
    ]
    seen: list[tuple[float, int, str]] = []
    readers = [threading.Thread(target=_read, args=(rank, process, seen)) for rank, process in enumerate(ranks)]
    for reader in readers:
        reader.start()
    for process in ranks:
        process.wait(120)
    gone_s = time.perf_counter()
    for reader in readers:
        reader.join()
    failed_s = next(at for at, _, line in seen if line == "FAILS")
    said_s = [max(at for at, rank, _ in seen if rank == each) for each in range(num_ranks) if each != 1]
    return max(said_s) - failed_s, gone_s - failed_s


def _read(rank: int, process: subprocess.Popen[bytes], seen: list[tuple[float, int, str]]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        seen.append((time.perf_counter(), rank, line.decode(errors="replace").strip()))


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-rank", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        rank_main(given.as_rank)
        return
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(given.rounds):  # in turns, so that a busy minute hits all kinds
        for kind in KINDS:
            found[kind].append(one_round(kind, given.ranks))
    if given.json:
        print(
            json.dumps(
                {kind: {"said_s": [s for s, _ in each], "gone_s": [g for _, g in each]} for kind, each in found.items()}
            )
        )
        return
    print(
        f"{given.ranks} ranks, {given.rounds} rounds; seconds after the failure, median (worst); "
        f"load average {os.getloadavg()[0]:.1f} at the end"
    )
    for kind, each in found.items():
        said, gone = zip(*each, strict=True)
        print(
            f"{kind:10} said {statistics.median(said):.2f} ({max(said):.2f})   "
            f"gone {statistics.median(gone):.2f} ({max(gone):.2f})"
        )


if __name__ == "__main__":
    main()
