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
from functools import partial
from pathlib import Path
from typing import Any, Final

from pipeloom.launch.words import FOLDER, LAUNCHER, Ended, Words

HANDLED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FAILED: Final = 1
_BY_SIGNAL: Final = 128
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
    _num_passed_on: int = 0
    _attempt: int = 0

    def run(self) -> Ended:
        """Start the ranks and wait for their end."""
        with tempfile.TemporaryDirectory(prefix="pipeloom-launch-") as place, _silenced(), _environment(place):
            words = Words(Path(place))
            agent = _agent(self.command, self.num_ranks, self.max_restarts, place, partial(self._begin, words))
            with self._receiving():
                result = self._supervise(agent, words)
            return self._ended(words, result)

    def _begin(self, words: Words, attempt: int) -> None:
        """Called before each attempt, from 0."""
        if attempt and not words.is_over:
            cause = words.cause(attempt - 1) or "a process ended without a word"
            self.say(f"{cause}\nstarting again, {attempt} of {self.max_restarts} times")
        self._attempt = attempt

    def _supervise(self, agent: Any, words: Words) -> Any:
        """Run the agent in a thread, and let no rank outlive this."""
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(_outcome(agent)), name="elastic agent")
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_PAUSE_S)
                self._pass_on(agent, words)
        finally:
            if thread.is_alive():
                words.stop()
                _kill(agent)
                thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    def _pass_on(self, agent: Any, words: Words) -> None:
        """Pass the first signal on, and kill at the second one. Ranks that start later find that they need not."""
        for number in range(self._num_passed_on, len(self._received)):
            if number == 0 and not words.is_over:
                self.say("stopping after this step; a second signal ends at once")
            words.stop()
            _tell(agent) if number == 0 else _kill(agent)
            self._num_passed_on += 1

    @contextlib.contextmanager
    def _receiving(self) -> Iterator[None]:
        # What is ignored stays so: nohup.
        numbers = [number for number in HANDLED if signal.getsignal(number) != signal.SIG_IGN]
        previous = {
            number: signal.signal(number, lambda number, _: self._received.append(number)) for number in numbers
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _ended(self, words: Words, result: Any) -> Ended:
        """What all of it means: what a rank has left word of, else what the user has asked for, else a failure."""
        ended, is_failed = words.ended, bool(result.is_failed())
        if ended is not None and ended.code:
            is_asked_for = self._received and ended.code > _BY_SIGNAL
            return Ended(_BY_SIGNAL + self._received[0]) if is_asked_for else ended
        cause = words.cause(self._attempt) if is_failed and len(self._received) < 2 else None
        if cause is None and self._received and (ended is not None or is_failed):
            return Ended(_BY_SIGNAL + self._received[0], "stopped before all ranks could save")
        return Ended(FAILED, cause or _how_ranks_ended(result)) if is_failed else Ended(0)


@contextlib.contextmanager
def _environment(place: str) -> Iterator[None]:
    """What the ranks inherit; put back at the end, or this process would be taken for one of them."""
    before = dict(os.environ)
    os.environ |= {FOLDER: place, LAUNCHER: str(os.getpid())}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        for name in (FOLDER, LAUNCHER, "OMP_NUM_THREADS"):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _agent(command: Sequence[str], num_ranks: int, max_restarts: int, place: str, begin: Callable[[int], None]) -> Any:
    """torchrun's agent, as ``--standalone`` makes it."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    class Logs(DefaultLogsSpecs):
        """Where the output of ranks goes; asked before each attempt."""

        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            begin(int(envs[0]["TORCHELASTIC_RESTART_COUNT"]))
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
    return LocalElasticAgent(spec, Logs(place, tee=tee), log_line_prefix_template="[rank ${rank}] ")


def _outcome(agent: Any) -> Any:
    """What came of it, or the exception; in the agent's thread."""
    try:
        return agent.run()
    except BaseException as error:
        return error


def _pids(agent: Any) -> list[int]:
    return [worker.id for worker in agent.get_worker_group().workers if isinstance(worker.id, int)]


def _tell(agent: Any) -> None:
    """Let ranks stop: SIGTERM to them alone, not to what they have started."""
    for pid in _pids(agent):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _kill(agent: Any) -> None:
    """End what a rank has started with it: each is a session of its own."""
    for pid in _pids(agent):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _how_ranks_ended(result: Any) -> str:
    # The agent itself has ended the others.
    rank, failure = min(result.failures.items(), key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[0]))
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
