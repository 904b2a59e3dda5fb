"""Who takes part, each used as its own documentation says."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.peers.by_hand import ByHand
from benchmarks.peers.trial import Part

# Above any norm here: clipping is in everybody's time, and nobody's numbers. DeepSpeed clips each stage by the norm of
# that stage alone, so with a lower limit it would train another model than the others.
CLIP_NORM = 1e6


@dataclass(frozen=True)
class Contestant:
    """What a user's loop does with one batch.

    Attributes:
        learn: (inputs, targets) → the loss where this process has it; all that the peer does up to the gradients.
        finish: what the loop does then: clip, step of the optimizer, dropped gradients.
        close: frees what holds threads or connections.
        num_threads: torch's, inside one operation.
    """

    learn: Callable[[Tensor, Tensor], Tensor | None]
    finish: Callable[[], None]
    close: Callable[[], None] = lambda: None
    num_threads: int = 1


def pipeloom(part: Part) -> Contestant:
    import pipeloom as pl

    pipe = pl.Pipeline(
        part.stages, schedule=part.schedule, num_microbatches=part.num_microbatches, loss_fn=part.loss_fn
    )

    def learn(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = pipe.step(inputs, target=targets)
        return loss

    if part.optimizer_options is None:
        return Contestant(learn, pipe.zero_grad, pipe.close)
    optimizer = pipe.optimizer(AdamW, **part.optimizer_options)
    return Contestant(learn, finishing(optimizer, lambda: pipe.clip_grad_norm_(CLIP_NORM)), pipe.close)


def torch_pipelining(part: Part) -> Contestant:
    """torch.distributed.pipelining: inputs on the first process, target and losses on the last.

    The loss function is a mean, so ``scale_grads`` stays True. ``return_outputs=False`` spares it merging what the loop
    does not read.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    module = part.own_stage()
    stage = PipelineStage(module, part.rank, part.num_stages, torch.device("cpu"), group=part.group)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[part.schedule]
    schedule = kind(stage, part.num_microbatches, loss_fn=part.loss_fn)

    def learn(inputs: Tensor, targets: Tensor) -> Tensor | None:
        args = (inputs,) if part.is_first else ()
        if not part.is_last:
            schedule.step(*args, return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(*args, target=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).mean()

    return Contestant(learn, finishing_stage(module, part))


def by_hand(part: Part) -> Contestant:
    loop = ByHand(part)
    return Contestant(loop, finishing_stage(loop.stage, part))


def one_process(part: Part) -> Contestant:
    """The first process runs all stages and accumulates gradients, with two threads; the others wait."""
    model = nn.Sequential(*part.stages)
    if part.rank != 0:
        return Contestant(lambda *_: None, lambda: None)

    def learn(inputs: Tensor, targets: Tensor) -> Tensor:
        count, losses = part.num_microbatches, []
        for some, their_targets in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = part.loss_fn(model(some), their_targets) / count
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    optimizer = AdamW(model.parameters(), **part.optimizer_options or {})
    finish = finishing(optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM))
    return Contestant(learn, finish, num_threads=2)


def deepspeed(part: Part) -> Contestant:
    """DeepSpeed's pipeline engine (always 1F1B): clips and steps inside ``train_batch``."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds  # type: ignore[import-not-found]
    from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found]

    ds.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    count, num_windows = part.num_microbatches, part.boundary_shape[0]
    module = PipelineModule(part.stages, num_stages=part.num_stages, loss_fn=part.loss_fn, partition_method="uniform")
    config = {
        "train_batch_size": count * num_windows,
        "train_micro_batch_size_per_gpu": num_windows,
        "gradient_accumulation_steps": count,
        "gradient_clipping": CLIP_NORM,
        "steps_per_print": 10**9,
    }
    optimizer = AdamW(module.parameters(), **part.optimizer_options or {})
    engine, *_ = ds.initialize(model=module, optimizer=optimizer, config=config)

    def learn(inputs: Tensor, targets: Tensor) -> Tensor:
        parts: Iterator[tuple[Tensor, Tensor]] = zip(inputs.chunk(count), targets.chunk(count), strict=True)
        loss: Tensor = engine.train_batch(data_iter=parts)
        return loss

    return Contestant(learn, lambda: None)


CONTESTANTS: dict[str, Callable[[Part], Contestant]] = {
    "pipeloom": pipeloom,
    "torch": torch_pipelining,
    "by_hand": by_hand,
    "one_process": one_process,
    "deepspeed": deepspeed,
}


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def finishing_stage(module: nn.Module, part: Part) -> Callable[[], None]:
    """For peers that leave clipping to their user, whose norm is over all stages (as torchtitan does it)."""
    if part.optimizer_options is None:
        return module.zero_grad
    optimizer = AdamW(module.parameters(), **part.optimizer_options)
    return finishing(optimizer, lambda: clip_over_ranks(module.parameters(), part.group))


def finishing(optimizer: torch.optim.Optimizer, clip: Callable[[], object]) -> Callable[[], None]:
    def finish() -> None:
        clip()
        optimizer.step()
        optimizer.zero_grad()

    return finish


def clip_over_ranks(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    held = [parameter for parameter in parameters if parameter.grad is not None]
    squared = nn.utils.get_total_norm([each.grad for each in held if each.grad is not None]) ** 2
    dist.all_reduce(squared, group=group)
    nn.utils.clip_grads_with_norm_(held, CLIP_NORM, squared.sqrt())
