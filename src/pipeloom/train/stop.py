"""Ctrl-C and SIGTERM: noted when they come, acted on between two steps, by all ranks after the same one.

An exception in the middle of a step would leave gradients half added and a checkpoint unwritten; and a rank that stops
a step before the others leaves them waiting. So a signal is only noted, and once in a step the ranks tell each other,
right after the norm of the gradients, where they have just waited for each other anyway.
"""

from __future__ import annotations

import contextlib
import signal
import struct
import threading
from collections.abc import Iterator

from pipeloom.checkpoint import Alone, Group
from pipeloom.train.metrics import peak_memory_bytes

_SAID = struct.Struct("<IQ")


class Stop:
    """Whether the ranks stop, and how much memory they have needed.

    Attributes:
        signal: the number of the one that all ranks act on; 0 while there is none.
        memory_bytes: the largest resident size that a rank's process has had, as of the last `agree`.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group = group or Alone()
        self.memory_bytes = 0
        self._received = 0
        self._agreed = 0

    @property
    def signal(self) -> int:
        """With one process, what it has received; else what all know of."""
        return self._agreed or (self._received if self.group.num_ranks == 1 else 0)

    def note(self, number: int) -> None:
        """Take note of a signal, as its handler does."""
        self._received = self._received or number

    def agree(self) -> None:
        """Tell the others, and hear from them; collective."""
        said = _SAID.pack(self._received, peak_memory_bytes())
        heard = [_SAID.unpack(each) for each in self.group.all_gather(said, "whether to stop")]
        self._agreed = next((number for number, _ in heard if number), 0)
        self.memory_bytes = max(num_bytes for _, num_bytes in heard)

    @contextlib.contextmanager
    def listening(self, *numbers: int) -> Iterator[None]:
        """Note the first of these signals; the second one ends this process at once, if it is no SIGHUP.

        That is what says that a launcher is gone, and the system says it again for each thread that it had.
        """
        if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
            yield
            return
        previous = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if not self._received:
            self.note(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
