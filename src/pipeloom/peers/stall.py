"""Who keeps everybody waiting: asked of all ranks, answered by each one's thread of connections.

A rank that waits too long knows of whom it waits, and that is rarely who is to blame: the other one may wait as well.
The rank to look at is the one at the end of that chain, which waits for nobody; its Python stack says what it is at.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue

from pipeloom.peers import kinds
from pipeloom.peers.cause import Cause
from pipeloom.peers.failure import Failures
from pipeloom.peers.mesh import Mesh

_ANSWER_S = 1.0
_NUM_FRAMES = 25
_PAUSE_S = 1.0


@dataclass(frozen=True)
class State:
    """What a rank is doing.

    Args:
        rank: who.
        doing: "stage 1, micro-batch 3, action 1F3"; "" if it does not answer.
        waits_for: another rank, or nobody.
        since_s: how long it has been doing that.
        stack: the Python stack of its main thread, as text.
        is_busy: something is under way to it or from it, so that it may go on by itself.
    """

    rank: int
    doing: str
    waits_for: int | None = None
    since_s: float = 0.0
    stack: str = ""
    is_busy: bool = False

    @property
    def line(self) -> str:
        """One line of a report."""
        if not self.doing:
            return f"rank {self.rank} does not answer: its process is stopped, or its Python is held"
        waits = "" if self.waits_for is None else f", waits for rank {self.waits_for}"
        return f"rank {self.rank}{waits}: {self.doing}, for {self.since_s:.1f} s"


class Stalls:
    """Asks, and answers the questions of others.

    Args:
        mesh: not yet started.
        failures: of the same mesh.
        state: says what this rank is doing; called in the thread of connections, so it has to be quick. The stack is
            added here.
    """

    def __init__(self, mesh: Mesh, failures: Failures, state: Callable[[], State]) -> None:
        self._mesh, self._failures, self._state = mesh, failures, state
        self._answers: SimpleQueue[State] = SimpleQueue()
        mesh.on(kinds.ASK, self._answer)
        mesh.on(kinds.ANSWER, lambda _, body: self._answers.put(State(**json.loads(bytes(body)))))

    def cause(self, what: str, limit_s: float) -> Cause:
        """Find out who is to blame that this rank waits for ``what`` since ``limit_s``.

        Returns:
            A cause for `Failures.tell`, with the report as its traceback.
        """
        states = self.ask()
        chain = chain_from(self._mesh.rank, states)
        blamed = states[chain[-1]]
        message = f"keeps the others waiting; rank {self._mesh.rank} has waited {limit_s:g} s (the limit) for {what}"
        return Cause(blamed.rank, "stalled", blamed.doing or "no answer", message, render(chain, states))

    def deadlock(self) -> Cause | None:
        """The cause that all ranks wait and none does anything, now and a second later; None if that is not so.

        Ranks that do not make the same calls wait for each other for ever; nobody has to sit out a limit for that.
        A rank that looks does not read meanwhile, so what has come to it unread makes it busy.
        """
        states = self.ask()
        if any(state.waits_for is None or state.is_busy for state in states.values()):
            return None
        time.sleep(_PAUSE_S)
        later = self.ask()
        if not all(_goes_on(states[rank], later[rank]) for rank in states):
            return None
        chain = chain_from(self._mesh.rank, later)
        first = min(later)
        message = (
            "all ranks wait for each other, and none does anything: they do not make the same calls on their pipeline, "
            "in the same order"
        )
        return Cause(first, "stalled", later[first].doing, message, render(chain, later))

    def ask(self) -> dict[int, State]:
        """What every rank is doing, by rank; who does not answer within 1 s is found doing nothing."""
        states = {rank: State(rank, "") for rank in range(self._mesh.num_ranks)}
        states[self._mesh.rank] = self._own()
        while not self._answers.empty():  # late ones, to an earlier question
            self._answers.get()
        self._mesh.broadcast(kinds.ASK)
        until = time.monotonic() + _ANSWER_S
        while (left_s := until - time.monotonic()) > 0 and not all(state.doing for state in states.values()):
            try:
                answer = self._answers.get(timeout=left_s)
            except Empty:
                break
            states[answer.rank] = answer
        return states

    def _answer(self, peer: int, _: memoryview) -> None:
        self._mesh.send(peer, kinds.ANSWER, json.dumps(asdict(self._own())).encode())

    def _own(self) -> State:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame, _NUM_FRAMES)) if frame else ""
        return State(**{**asdict(self._state()), "rank": self._mesh.rank, "stack": stack})


def _goes_on(one: State, later: State) -> bool:
    """Whether a rank has waited for the same thing in between."""
    is_same = (one.doing, one.waits_for) == (later.doing, later.waits_for)
    return is_same and not later.is_busy and later.since_s >= one.since_s + _PAUSE_S / 2


def chain_from(rank: int, states: Mapping[int, State]) -> list[int]:
    """Return who waits for whom, from ``rank`` to the one that waits for nobody, or to the first one again."""
    chain = [rank]
    while (following := states[chain[-1]].waits_for) is not None:
        chain.append(following)
        if following in chain[:-1]:
            break
    return chain


def render(chain: list[int], states: Mapping[int, State]) -> str:
    """Return the report: what each rank does, the chain of who waits for whom, and the stack at its end."""
    last = states[chain[-1]]
    lines = ["what the ranks are doing:", *(f"  {states[rank].line}" for rank in sorted(states))]
    arrows = " -> ".join(f"rank {rank}" for rank in chain)
    if chain[-1] in chain[:-1]:
        lines.append(f"they wait for each other in a circle: {arrows}")
    elif len(chain) > 1:
        lines.append(f"who waits for whom: {arrows}, which {'waits for nobody' if last.doing else 'does not say'}")
    if last.stack:
        lines += [f"the Python stack of rank {last.rank}:", last.stack.rstrip()]
    return "\n".join(lines)
