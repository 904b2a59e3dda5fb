"""What one set of processes is asked to run, and what each of its processes makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy

LossFn = Callable[[Tensor, Tensor], Tensor]

ADAMW_OPTIONS = {"lr": 1e-3, "fused": True}
TEXT_BYTES = 1_000_000  # of the standard library: enough windows for every step, too few to show in the memory


@dataclass(frozen=True)
class Trial:
    """One model under one schedule, and who runs it; travels to the processes as JSON.

    Attributes:
        row: the part of the table that it belongs to.
        model: "virtual" stages wait instead of computing; "gpt" is the default model of `pipeloom train`.
        num_processes: how many are started.
        peers: who runs it, in turns; names of `contestants.CONTESTANTS`.
        num_warmup_steps: of each peer before anybody is timed.
        num_rounds: how often each peer has its turn.
        num_steps: timed steps in a turn, after one that is not.
    """

    row: str
    model: Literal["virtual", "gpt"]
    schedule: str
    num_processes: int
    num_microbatches: int
    peers: tuple[str, ...]
    num_warmup_steps: int
    num_rounds: int
    num_steps: int
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass(frozen=True)
class Part:
    """What a peer gets in one process.

    Attributes:
        stages: the whole model, made in every process as a user's script does; `own_stage` lets go of the others.
        group: of all processes, for this peer alone, so that nobody takes another's messages.
        boundary_shape: of what goes from stage to stage for one micro-batch.
        optimizer_options: of AdamW; None: the loop has no optimizer and only drops the gradients between steps.
    """

    schedule: str
    num_microbatches: int
    rank: int
    num_stages: int
    stages: list[nn.Module]
    loss_fn: LossFn
    group: ProcessGroup | None
    boundary_shape: tuple[int, ...]
    optimizer_options: dict[str, Any] | None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.num_stages - 1

    def own_stage(self) -> nn.Module:
        """Take this process's stage out, and forget the other processes' stages with their memory."""
        own = self.stages[self.rank]
        self.stages.clear()
        return own


def part(trial: Trial, rank: int, group: ProcessGroup | None) -> Part:
    """Make the trial's model anew; its weights are the same in every process and for every peer."""
    shape: tuple[int, ...] = (1, 1)
    if trial.model == "virtual":
        from pipeloom.testing.virtual import virtual_stages

        stages = virtual_stages(trial.num_processes, trial.forward_s, trial.backward_s)
    else:
        stages, shape = gpt_stages(trial.num_microbatches)
    loss_fn, options = LOSSES[trial.model]
    count = trial.num_microbatches
    return Part(trial.schedule, count, rank, len(stages), stages, loss_fn, group, shape, options)


def gpt_stages(num_microbatches: int) -> tuple[list[nn.Module], tuple[int, ...]]:
    """The default GPT in the two stages that `pipeloom train` cuts it into, and the shape between them."""
    from pipeloom.splitting import split
    from pipeloom.train.config import TrainingConfig
    from pipeloom.train.factory import build_model

    config = TrainingConfig()
    cut = split(build_model(config.model, seed=0), num_stages=config.pipeline.num_stages)
    stages: list[nn.Module] = [nn.Sequential(*(unit.module for unit in units)) for units in cut.stages]
    num_windows = config.train.batch_size // num_microbatches
    return stages, (num_windows, config.model.sequence_length, config.model.width)


def batches(trial: Trial) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets without end, the same for every peer that begins at the first."""
    if trial.model == "virtual":
        zeros = torch.zeros(trial.num_microbatches, 1)
        return repeat((zeros, zeros))
    from pipeloom.train.batches import Batches
    from pipeloom.train.config import TrainingConfig

    config = TrainingConfig()
    return Batches(
        text(), batch_size=config.train.batch_size, sequence_length=config.model.sequence_length, seed=config.train.seed
    )


def text() -> NDArray[np.uint8]:
    """The beginning of the standard library's source."""
    from pipeloom.train.corpus import standard_library

    read = bytearray()
    for document in standard_library():
        read += document.text
        if len(read) >= TEXT_BYTES:
            break
    return np.frombuffer(bytes(read[:TEXT_BYTES]), np.uint8)


def mean_output(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, T, 256) against (B, T); not `pipeloom.train`'s, whose module loads all of Pipeloom into every peer."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


LOSSES: dict[str, tuple[LossFn, dict[str, Any] | None]] = {
    "virtual": (mean_output, None),
    "gpt": (next_byte_loss, ADAMW_OPTIONS),
}
