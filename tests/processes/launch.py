"""Start the processes of a test with torchrun, and read what each of them said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_END_S = 60.0


@dataclass(frozen=True)
class Finished:
    """How the processes ended.

    Args:
        code: torchrun's exit code.
        outputs: per rank, what it printed and complained.
    """

    code: int
    outputs: list[str]


def torchrun(num_processes: int, folder: Path, words: Sequence[str], *, timeout_s: float = 280.0) -> Finished:
    """Run ``python WORDS`` in several processes; all of them are gone when this returns."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--redirects", "3"]
    command += ["--nproc-per-node", str(num_processes), "--log-dir", str(folder), *words]
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        code = agent.wait(timeout_s)
    finally:  # when the time is over: killed, torchrun would leave its processes to run on
        agent.terminate()
        agent.wait(_END_S)
    return Finished(code, [output_of(folder, rank) for rank in range(num_processes)])


def output_of(folder: Path, rank: int) -> str:
    """What a rank has printed and complained so far."""
    found = [*folder.glob(f"*/attempt_*/{rank}/stdout.log"), *folder.glob(f"*/attempt_*/{rank}/stderr.log")]
    return "".join(path.read_text(errors="replace") for path in found)
