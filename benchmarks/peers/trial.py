"""What one set of processes is asked to run, and what each of its processes makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy

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
    """What a peer gets in one process: the whole model as stages, of which it keeps those that it runs.

    Attributes:
        group: of all processes, for this peer alone, so that nobody takes another's messages.
        boundary_shape: of what goes from stage to stage for one micro-batch.
        optimizer: makes one of parameters; None: the loop only drops the gradients between steps.
    """

    schedule: str
    num_microbatches: int
    rank: int
    stages: list[nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    group: ProcessGroup | None
    boundary_shape: tuple[int, ...]
    optimizer: Callable[..., torch.optim.Optimizer] | None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == len(self.stages) - 1


def part(trial: Trial, rank: int, group: ProcessGroup | None) -> Part:
    """Make the trial's model anew; its weights are the same in every process and for every peer."""
    if trial.model == "virtual":
        from pipeloom.testing.virtual import virtual_stages

        stages = virtual_stages(trial.num_processes, trial.forward_s, trial.backward_s)
        return Part(trial.schedule, trial.num_microbatches, rank, stages, mean_output, group, (1, 1), None)
    stages, shape = gpt_stages(trial.num_microbatches)
    return Part(trial.schedule, trial.num_microbatches, rank, stages, next_byte_loss, group, shape, adamw)


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


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
