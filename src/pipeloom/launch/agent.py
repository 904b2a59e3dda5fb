"""The launcher: ranks under torchrun's elastic agent, with one voice and one exit code.

torchrun ends with its own traceback whatever the ranks have said, starts again what will fail the same way, and lets
ranks live on if a second Ctrl-C comes at the wrong moment. So the agent runs in a thread here, which leaves the signals
to the main thread: the first one is passed on to the ranks, which save and end, and the second one kills them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pipeloom.launch.words import FOLDER, LAUNCHER, Ended, Words, cause_of

HANDLED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FAILED: Final = 1
_PAUSE_S: Final = 0.05

Say = Callable[[str], None]


@dataclass
class Launch:
    """Ranks that run one command, until all have ended.

    Args:
        command: a program and its arguments, the same for every rank.
        num_ranks: how many processes.
        max_restarts: how often they are all started again after one of them failed.
        say: prints a line on stderr.
    """

    command: Sequence[str]
    num_ranks: int
    max_restarts: int
    say: Say
    _received: list[int] = field(default_factory=list)
    _told: set[int] = field(default_factory=set)

    def run(self) -> Ended:
        """Start the ranks and wait for their end."""
        with tempfile.TemporaryDirectory(prefix="pipeloom-launch-") as place, _silenced():
            words = Words(Path(place))
            os.environ |= {FOLDER: place, LAUNCHER: str(os.getpid())}
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            agent = _agent(self.command, self.num_ranks, self.max_restarts, Path(place), self.say)
            with self._receiving():
                result = self._supervise(agent, words)
            return self._ended(words, result, Path(place))

    def _supervise(self, agent: Any, words: Words) -> Any:
        """Run the agent in a thread, and let no rank outlive this."""
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(_outcome(agent)), name="elastic agent")
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_PAUSE_S)
                if self._received:
                    self._pass_on(agent, words)
        finally:
            _kill(agent)
            thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    def _pass_on(self, agent: Any, words: Words) -> None:
        if not self._told and not words.is_over:
            self.say("stopping after this step; a second signal ends at once")
        words.stop()
        if len(self._received) > 1:
            _kill(agent)
        for pid in _pids(agent):
            if pid not in self._told:
                self._told.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    @contextlib.contextmanager
    def _receiving(self) -> Iterator[None]:
        previous = {number: signal.getsignal(number) for number in HANDLED}
        for number, handler in previous.items():
            if handler != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda number, _: self._received.append(number))
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _ended(self, words: Words, result: Any, place: Path) -> Ended:
        ended, is_failed = words.ended, bool(result.is_failed())
        cause = cause_of(place.glob("*/attempt_*/*/error.json")) if is_failed and len(self._received) < 2 else None
        if ended is not None and ended.message:
            return ended
        if cause is not None:
            return Ended(FAILED, cause)
        if self._received and (ended is not None or is_failed):
            has_spoken = ended is not None and ended.code
            return Ended(128 + self._received[0], "" if has_spoken else "stopped before all ranks could save")
        if is_failed:
            return Ended(FAILED, _how_ranks_ended(result))
        return ended or Ended(0)


def _agent(command: Sequence[str], num_ranks: int, max_restarts: int, place: Path, say: Say) -> Any:
    """torchrun's agent, as ``--standalone`` makes it."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    class Logs(DefaultLogsSpecs):
        """Where the output of ranks goes; asked before each attempt."""

        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            attempt = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
            if attempt:
                cause = cause_of(place.glob(f"*/attempt_{attempt - 1}/*/error.json")) or "a rank ended without a word"
                say(f"{cause}\nstarting again, {attempt} of {max_restarts} times")
            return super().reify(envs)

    # The first rank has the terminal to itself, for its progress bar; all else goes through files, line by line.
    tee = {rank: Std.ALL if rank else Std.ERR for rank in range(num_ranks)}
    # An address, because a host's own name often leads nowhere.
    where = RendezvousParameters("c10d", "localhost:0", str(uuid.uuid4()), 1, 1, local_addr="127.0.0.1")
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        rdzv_handler=get_rendezvous_handler(where),
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=max_restarts,
        monitor_interval=_PAUSE_S,
        local_addr="127.0.0.1",
    )
    return LocalElasticAgent(spec, Logs(str(place), tee=tee), log_line_prefix_template="[rank ${rank}] ")


def _outcome(agent: Any) -> Any:
    """What came of it, or the exception; in the agent's thread."""
    try:
        return agent.run()
    except BaseException as error:
        return error


def _pids(agent: Any) -> list[int]:
    return [worker.id for worker in agent.get_worker_group().workers if isinstance(worker.id, int)]


def _kill(agent: Any) -> None:
    """End what a rank has started with it: each is a session of its own."""
    for pid in _pids(agent):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _how_ranks_ended(result: Any) -> str:
    rank, failure = min(result.failures.items())
    how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"left with code {failure.exitcode}"
    return f"rank {rank} (pid {failure.pid}) {how}, and no rank could say why"


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Without the agent's own reports: what a user needs of them is said here."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
