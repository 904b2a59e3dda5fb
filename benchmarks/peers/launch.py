"""Start a trial's processes with torchrun, and bring back what they saw."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.trial import Trial

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0
GRACE_S = 30.0  # torchrun ends its workers before itself


class TrialFailed(Exception):
    """The processes failed; the text is the end of what they wrote."""


def seen_by_processes(trial: Trial) -> list[dict[str, Any]]:
    """Run a trial; return per process a `worker.Seen` as a dict.

    Raises:
        TrialFailed: a process failed, or they did not end in time.
    """
    seen: list[dict[str, Any]] = result_of_processes("benchmarks.peers.worker", trial.num_processes, asdict(trial))
    return seen


def result_of_processes(worker: str, num_processes: int, given: dict[str, Any]) -> Any:
    """Run a module in processes of its own; return what it wrote, as JSON, into the file that its last argument names.

    Args:
        worker: the module; its first argument is ``given`` as JSON.

    Raises:
        TrialFailed: a process failed, or they did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "seen.json")
        count = ["--nproc-per-node", str(num_processes)]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *count]
        _run([*command, "-m", worker, json.dumps(given), str(result)])
        return json.loads(result.read_text())


def _run(command: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with _ending_on_sigterm(), subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        try:
            written, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise TrialFailed(f"no end after {LIMIT_S:g} s; {_ended(process)[-2000:]}") from None
        except BaseException:
            _ended(process)
            raise
    if process.returncode:
        raise TrialFailed(_cause(written))


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the processes too; by itself it would end this one only, and leave them."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _python_path() -> str:
    """The benchmarks, and Pipeloom too where another environment (with DeepSpeed, say) has none installed."""
    return os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))


def _ended(process: subprocess.Popen[str]) -> str:
    """Have torchrun end its workers and itself; killed at once, it would leave them."""
    process.terminate()
    try:
        return process.communicate(timeout=GRACE_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def _cause(written: str) -> str:
    """The first process's traceback, without torchrun's own behind it."""
    lines = written.splitlines()
    start = next((at for at, line in enumerate(lines) if "Traceback" in line), None)
    if start is None:
        return "\n".join(lines[-20:])
    process = lines[start].split("Traceback")[0]
    own = [line.removeprefix(process) for line in lines[start:] if line.startswith(process)]
    end = next((at for at, line in enumerate(own) if not line.startswith((" ", "Traceback"))), len(own))
    return "\n".join(own[: end + 1])
