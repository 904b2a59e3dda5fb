"""One thing that a rank does.

torch's ``_Action`` is a tuple with a string for its kind: it equals a bare tuple, and a fused action needs
a fake stage of -1. Here an action is a small frozen value, and its kind is an enumeration that equals
nothing but itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What an action does; the values are spelled as torch.distributed.pipelining spells them.

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

    def __init__(self, text: str) -> None:
        self.text = text
        self.code = len(type(self).__members__)

    @property
    def is_compute(self) -> bool:
        """Whether the action occupies its rank; transfers do not."""
        return self in COMPUTE_KINDS

    @property
    def is_send(self) -> bool:
        """Whether the action posts a message."""
        return self in SEND_KINDS

    @property
    def is_recv(self) -> bool:
        """Whether the action posts a buffer for a message."""
        return self in RECV_KINDS


COMPUTE_KINDS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE})
SEND_KINDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECV_KINDS = frozenset({Kind.RECV_F, Kind.RECV_B})


@dataclass(frozen=True, slots=True)
class Action:
    """One kind of work, of one stage, for one micro-batch.

    ``RECV_F`` of stage 3 receives what stage 3 takes as input; ``SEND_F`` of stage 3 sends what it returned.

    Args:
        kind: what is done.
        stage: index of the stage, counted from 0 in model order.
        microbatch: index of the micro-batch, counted from 0.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __hash__(self) -> int:
        return hash((self.kind.code, self.stage, self.microbatch))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.text}{self.microbatch}"
