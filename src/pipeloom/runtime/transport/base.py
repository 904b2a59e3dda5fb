"""What an executor asks of a transport: contract 18 in three methods."""

from __future__ import annotations

from typing import Any, Protocol

from pipeloom.ir import Action


class Aborted(Exception):
    """This rank was told to stop."""


class Transport(Protocol):
    """One ordered channel per directed pair of ranks.

    A send posts and returns; a receive is posted at its place and waited for by its consumer; a channel delivers
    in order.
    """

    def send(self, action: Action, message: Any) -> None:
        """Post a message; never waits."""

    def post(self, action: Action) -> None:
        """Post a receive: from here until it is taken it occupies a slot."""

    def take(self, action: Action) -> Any:
        """Wait for the message of a posted receive and free its slot.

        Raises:
            Aborted: the step ends before the message comes.
        """
