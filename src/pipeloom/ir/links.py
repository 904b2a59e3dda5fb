"""Which stages hand values to each other beside the chain.

Passing a value that skips stages along the chain costs a transfer and a copy on every rank between. Here it goes
straight from its producer to each consumer. Its gradient goes from the latest consumer to the next earlier one,
and from the earliest to the producer, because autograd adds up in that order; so backward links may join stages
that no forward link does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeloom.errors import UnsupportedShape
from pipeloom.ir.action import Action, Kind

Pairs = tuple[tuple[int, int], ...]
_FORWARD_KINDS = frozenset({Kind.SEND_F, Kind.RECV_F})


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a schedule that skip stages; both kinds are kept sorted, each pair once.

    Args:
        forward: pairs (producer, consumer) of stages; the consumer comes after the producer's neighbour.
        backward: pairs (sender, receiver) of gradients; the receiver comes before the sender's neighbour.

    Raises:
        UnsupportedShape: a pair is of neighbours, which the chain links, or points the wrong way, or before stage 0.
    """

    forward: Pairs = ()
    backward: Pairs = ()

    def __post_init__(self) -> None:
        for name, sign in (("forward", 1), ("backward", -1)):
            pairs = tuple(sorted({(source, to) for source, to in getattr(self, name)}))
            object.__setattr__(self, name, pairs)
            for source, to in pairs:
                if min(source, to) < 0 or (to - source) * sign < 2:
                    raise UnsupportedShape(
                        f"{name} link ({source}, {to}) was given; a {name} link leads over at least one stage to "
                        f"{'a later' if sign > 0 else 'an earlier'} one, and stages count from 0",
                        "neighbours hand over along the chain, without a link",
                    )

    @classmethod
    def of(cls, actions: Iterable[Action]) -> Links:
        """The links over which the transfers among ``actions`` go."""
        skips = [action for action in actions if action.peer is not None]
        forward = tuple(_ends(action) for action in skips if action.kind in _FORWARD_KINDS)
        return cls(forward, tuple(_ends(action) for action in skips if action.kind not in _FORWARD_KINDS))

    def __bool__(self) -> bool:
        return bool(self.forward or self.backward)

    def __str__(self) -> str:
        pairs = [f"{a}>{b}" for a, b in (*self.forward, *self.backward)]
        return f"links {' '.join(pairs)}"

    def has(self, transfer: Action) -> bool:
        """Whether an action with a peer is an end of a transfer over one of the links."""
        pairs = self.forward if transfer.kind in _FORWARD_KINDS else self.backward
        return transfer.kind.is_transfer and _ends(transfer) in pairs

    def check_range(self, num_stages: int) -> None:
        """Raise `UnsupportedShape` if a link names a stage that is not there."""
        for pair in (*self.forward, *self.backward):
            if max(pair) >= num_stages:
                raise UnsupportedShape(f"link {pair} names stage {max(pair)}; there are {num_stages}, counted from 0")


def _ends(transfer: Action) -> tuple[int, int]:
    """The stages that a transfer with a peer leads from and to."""
    assert transfer.peer is not None, "the caller looks"
    return (transfer.stage, transfer.peer) if transfer.kind.is_send else (transfer.peer, transfer.stage)


NO_LINKS = Links()
