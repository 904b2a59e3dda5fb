"""One thing that a rank does.

torch's ``_Action`` is a tuple with a string for its kind: it equals a bare tuple, and a fused action needs
a fake stage of -1. Here an action is a small frozen value, and its kind is an enumeration that equals
nothing but itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Kind(enum.Enum):
    """What an action does; the values are spelled as torch.distributed.pipelining spells them.

    torch has no ``U``: the optimizer's step of one stage, inside a program (`pipeloom.ir.versions`).

    Beware of the papers: Zero Bubble (Qi et al., ICLR 2024) calls our ``I`` "B" and our ``B`` "BW".

    Attributes:
        text: the spelling; ``value`` as a plain attribute.
        code: a small number of its own. An enumeration hashes by a function in Python, so whatever looks up a
            million actions looks up codes.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "R"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    UPDATE = "U"

    def __init__(self, text: str) -> None:
        self.text = text
        self.code = len(type(self).__members__)

    @property
    def mark(self) -> str:
        """What stands before the peer of a transfer: ``>`` for where it goes, ``<`` for where it comes from."""
        return ">" if self.is_send else "<" if self.is_recv else ""

    @property
    def is_compute(self) -> bool:
        """Whether the action occupies its rank; transfers, and what is done with parameters, do not."""
        return self in COMPUTE_KINDS

    @property
    def is_send(self) -> bool:
        """Whether the action posts a message."""
        return self in SEND_KINDS

    @property
    def is_recv(self) -> bool:
        """Whether the action posts a buffer for a message."""
        return self in RECV_KINDS

    @property
    def is_transfer(self) -> bool:
        """Whether the action is an end of a message."""
        return self in TRANSFER_KINDS

    @property
    def is_of_stage(self) -> bool:
        """Whether the action is done once for a stage and all its micro-batches: it is about parameters."""
        return self in STAGE_KINDS


COMPUTE_KINDS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE})
BACKWARD_KINDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
"""A whole backward and its halves: what may add to gradients. I too: a parameter not worth a W gets its own there."""
LAST_KINDS = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRAD})
"""What a micro-batch ends with on a stage: its gradients are added up then."""
SEND_KINDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECV_KINDS = frozenset({Kind.RECV_F, Kind.RECV_B})
TRANSFER_KINDS = SEND_KINDS | RECV_KINDS
STAGE_KINDS = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})

ALL = -1
"""In the place of a micro-batch: of what is done once for all of them."""


@dataclass(frozen=True, slots=True)
class Action:
    """One kind of work, of one stage, for one micro-batch.

    ``RECV_F`` of stage 3 receives what stage 3 takes as input; ``SEND_F`` of stage 3 sends what it returned.

    Args:
        kind: what is done.
        stage: index of the stage, counted from 0 in model order.
        microbatch: index of the micro-batch, counted from 0; `ALL` for UNSHARD, RESHARD and REDUCE_GRAD.
        peer: the stage at the other end of a transfer that skips stages (`pipeloom.ir.Links`); None for the
            neighbour, and for what is no transfer.
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    def __hash__(self) -> int:
        # Without the peer: None hashes by its address before Python 3.12, and few actions differ in nothing else.
        return hash((self.kind.code, self.stage, self.microbatch))

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.text}{'' if self.kind.is_of_stage else self.microbatch}"
        return text if self.peer is None else f"{text}{self.kind.mark}{self.peer}"


class Pin(NamedTuple):
    """Which version of its stage's weights a forward uses, where that is not the newest.

    Args:
        forward: an F.
        version: how many updates the weights have had; 0 are those at the start.
    """

    forward: Action
    version: int

    def __str__(self) -> str:
        return f"{self.forward}@{self.version}"


class Overlap(NamedTuple):
    """Two actions that a rank runs as one (DualPipe's F&B): they stand next to each other in its program.

    Whoever cannot run both at once runs one after the other, and sends what the first made before the second.

    Args:
        first: of one micro-batch.
        second: of another one, or of another stage; it needs nothing that ``first`` makes.
    """

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"({self.first}+{self.second})"
