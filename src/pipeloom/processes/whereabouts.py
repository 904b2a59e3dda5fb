"""Where a rank is in its program, for causes and reports. It holds no stage, so who is asked keeps no model alive."""

from __future__ import annotations

import time

from pipeloom.peers import Collective, State
from pipeloom.processes.post import Post
from pipeloom.runtime.control import Control


class Whereabouts:
    """What a rank does, waits for, and has heard of others.

    Args:
        rank: which.
        num_ranks: how many there are.

    Attributes:
        what: the call that runs, or ran last: "step 7".
        is_inside: whether it runs.
        since_s: when that, or the wait, began (`time.monotonic`).
        control: knows the action.
        post: knows what is waited for; None before there is one.
        collective: knows who is waited for.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self.what, self.is_inside, self.since_s = "the start", True, time.monotonic()
        self.control = Control(num_ranks)
        self.post: Post | None = None
        self.collective: Collective | None = None

    def begin(self, what: str) -> None:
        """A call begins."""
        self.what, self.is_inside, self.since_s = what, True, time.monotonic()
        self.control = Control(self._num_ranks)

    @property
    def place(self) -> str:
        """Where this rank is: "stage 1, micro-batch 3, action 1F3 of step 7"."""
        action = self.control.last_seen[self._rank]
        if not self.is_inside:
            return f"outside a step, after {self.what}"
        if action is None:
            return self.what
        return f"stage {action.stage}, micro-batch {action.microbatch}, action {action} of {self.what}"

    def of(self, rank: int) -> str:
        """Where a rank was, as far as this one knows."""
        if rank == self._rank:
            return self.place
        heard = None if self.post is None else self.post.last_heard.get(rank)
        when = "" if heard is None else f", when it had sent what {heard.decode()} receives"
        return f"last heard of in {self.what}{when}"

    def state(self) -> State:
        """What this rank is doing; asked by others, in the thread of connections."""
        doing, waits_for, since_s = self._doing()
        is_busy = self.post is not None and self.post.is_busy
        is_busy |= self.collective is not None and self.collective.has_unread
        return State(self._rank, doing, waits_for, time.monotonic() - since_s, is_busy=is_busy)

    def _doing(self) -> tuple[str, int | None, float]:
        waiting = None if self.post is None else self.post.waiting
        missing = [] if self.collective is None else self.collective.missing
        if waiting is not None:
            return f"waits for {waiting.what} at {self.place}", waiting.peer, waiting.since_s
        if missing:
            ranks = ", ".join(map(str, missing))
            return f"waits for rank {ranks} to meet, after {self.place}", missing[0], self.since_s
        return self.place, None, self.since_s
