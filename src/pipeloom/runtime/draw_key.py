"""What random numbers are a function of: what runs, never who runs it or when."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class DrawKey(NamedTuple):
    """What random numbers are a function of; nothing in it says which rank or thread runs.

    A tuple, because one is made for every call of every unit, and a frozen dataclass takes ten times as long.

    Args:
        seed: of the whole run.
        step_index: the step, counted from 0.
        data_rank: which data replica.
        microbatch: which part of the batch.
        unit: name of the unit in the user's model.
    """

    seed: int
    step_index: int
    data_rank: int
    microbatch: int
    unit: str

    def generator_seed(self, call: int = 0, order: int = 0) -> int:
        """A seed of 63 bits, the same in every process and on every machine.

        The CPU's Mersenne twister starts from the low 32 bits of it, as it does with any seed.

        Args:
            call: which call of the unit within one forward of the micro-batch.
            order: 0 for the first device of its type on which this call draws, 1 for the second, and so on.
        """
        parts = (*self, call, order)
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
