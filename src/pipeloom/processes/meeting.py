"""What all processes compare before the first step."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping

from pipeloom.errors import PipeloomWarning, ProcessError


def check_alike(
    rank: int, facts: Mapping[str, str], weights: str, all_gather: Callable[[bytes, str], list[bytes]]
) -> None:
    """Compare what must be the same on all ranks; collective.

    Args:
        rank: this one.
        facts: by what they are.
        weights: a checksum of the model as this process made it; others may differ, with a warning.
        all_gather: gives every rank's payload.

    Raises:
        ProcessError: a fact is not the same everywhere.
    """
    said = json.dumps({"facts": dict(facts), "weights": weights}).encode()
    parts = [json.loads(each) for each in all_gather(said, "the start")]
    for other, part in enumerate(parts):
        for what, value in parts[0]["facts"].items():
            if part["facts"][what] != value:
                raise ProcessError(
                    f"{what} is {value} on rank 0, but {part['facts'][what]} on rank {other}; all ranks of a "
                    "pipeline make the same one",
                    "start every process with the same program, options and environment",
                )
    if rank == 0 and len({part["weights"] for part in parts}) > 1:
        warnings.warn(
            "the processes made models with different weights; each stage keeps those of its own rank, and tied "
            "weights those of the first stage that uses them, so two runs will differ: call torch.manual_seed(...) "
            "before making the model",
            PipeloomWarning,
            stacklevel=7,  # the caller of Pipeline()
        )
