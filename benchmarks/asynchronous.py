"""Does training without a flush come as far? Held-out losses of PipeDream and 2BW beside synchronous training.

    python -m benchmarks.asynchronous [--steps 750] [--stages 2] [--micro-batches N] [--width 192] [--beta1 0.9]
        [--learning-rate 0.002] [--nu 1.0] [--schedules NAMES]

The default run of `pipeloom train`: its model, text, batches, AdamW, warm-up, cosine and number of updates, from the
same weights. Nothing is tuned unless an option says so. With a gradient that comes one update late Adam bears much less
curvature, because momentum goes on pushing where it should already brake (docs/asynchronous.md). ``--nu`` takes QHAdam
instead (Ma and Yarats, "Quasi-hyperbolic momentum and Adam for deep learning", ICLR 2019; of pytorch_optimizer), whose
step is ν of the momentum and 1 − ν of the gradient itself, and so brakes sooner. What differs else is the schedule, and
that each stage of a stream clips its gradients by their own norm, because nobody has the norm of all stages before the
first one has to update. Losses are in nats per byte; a ratio is to the first schedule of the list.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import pipeloom as pl
from pipeloom.schedules import entry
from pipeloom.train.batches import Batches, held_out_windows
from pipeloom.train.config import ModelConfig, OptimizerConfig, TrainConfig, TrainingConfig
from pipeloom.train.corpus import load_corpus
from pipeloom.train.factory import build_model
from pipeloom.train.held_out import cross_entropy, next_byte_loss
from pipeloom.train.loop import learning_rate_at, make_optimizer

SYNCHRONOUS = "1f1b"
SCHEDULES = (SYNCHRONOUS, "pipedream", "pipedream-vertical-sync", "pipedream-2bw")
_WINDOWS_AT_ONCE = 64


class Run:
    """The default training run for some steps, with any schedule.

    Args:
        config: of the run.
        num_stages: how many.
        num_microbatches: of a batch in a stream; None: as the schedule has it.
        nu: of QHAdam, the share of the momentum in a step; 1: AdamW, as the run has it.
    """

    def __init__(
        self, config: TrainingConfig, num_stages: int, num_microbatches: int | None = None, nu: float = 1.0
    ) -> None:
        self.config, self.num_stages, self.num_microbatches, self.nu = config, num_stages, num_microbatches, nu
        length = config.model.sequence_length
        corpus = load_corpus(config.data.paths, config.data.held_out_fraction, length)
        made = Batches(
            corpus.training, batch_size=config.train.batch_size, sequence_length=length, seed=config.train.seed
        )
        self.batches = list(itertools.islice(made, config.train.steps))
        windows = held_out_windows(corpus.held_out, config.metrics.num_held_out_windows, length)
        self.held_out = torch.from_numpy(windows.astype("int64"))

    def measure(self, name: str) -> dict[str, Any]:
        """Train from the start; the loss on held-out text afterwards, and of the first and last batches."""
        config = self.config
        model = build_model(config.model, config.train.seed)
        pinned = None if name == SYNCHRONOUS else self.num_microbatches or entry(name).microbatches_per_batch
        options = {
            "num_stages": self.num_stages,
            "num_microbatches": pinned or max(config.pipeline.num_microbatches, self.num_stages),
            "loss_fn": next_byte_loss,
            "seed": config.train.seed,
        }
        start_s = time.perf_counter()
        with pl.Pipeline(model, schedule=name, **options) as pipe:
            losses = self.in_steps(pipe) if name == SYNCHRONOUS else self.in_a_stream(pipe)
            seconds = time.perf_counter() - start_s
            versions = pipe.timeline.peak_versions_held
        tenth = max(1, len(losses) // 10)
        return {
            "schedule": name,
            "held_out_loss": self.score(model),
            "first_losses": sum(losses[:tenth]) / tenth,
            "last_losses": sum(losses[-tenth:]) / tenth,
            "versions_held": versions,
            "seconds": seconds,
        }

    def optimizer(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The run's own AdamW, or QHAdam with the same groups."""
        config = self.config.optimizer
        usual = make_optimizer(SimpleNamespace(parameters=lambda: weights), config)  # type: ignore[arg-type]
        if self.nu == 1:
            return usual
        from pytorch_optimizer import QHAdam  # here: it takes seconds to import

        return QHAdam(
            [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in usual.param_groups],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            nus=(self.nu, 1.0),
            weight_decouple=True,
            eps=config.epsilon,
        )

    def in_steps(self, pipe: pl.Pipeline) -> list[float]:
        """As `pipeloom train` does."""
        optimizer, losses = self.optimizer(list(pipe.parameters())), []
        for step, (inputs, targets) in enumerate(self.batches):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, len(self.batches), self.config.optimizer)
            losses.append(pipe.step(inputs, target=targets).item())
            pipe.clip_grad_norm_(self.config.optimizer.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def in_a_stream(self, pipe: pl.Pipeline) -> list[float]:
        """The same optimizer for each stage, the same rate at each update."""
        config = self.config.optimizer

        def optimizer(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
            made = self.optimizer(weights)
            made.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(weights, config.clip_norm) and None)
            return made

        def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            def share(step: int) -> float:
                return learning_rate_at(step, len(self.batches), config) / config.learning_rate

            return torch.optim.lr_scheduler.LambdaLR(optimizer, share)

        return pipe.stream(optimizer, scheduler=scheduler).train(self.batches).tolist()

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Nats per held-out byte."""
        model.eval()
        total = sum(
            float(cross_entropy(model(windows[:, :-1]), windows[:, 1:], reduction="sum"))
            for windows in self.held_out.split(_WINDOWS_AT_ONCE)
        )
        return total / self.held_out[:, 1:].numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=TrainConfig().steps)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, help="of a batch in a stream; by default as the schedule has it")
    parser.add_argument("--width", type=int, default=ModelConfig().width)
    parser.add_argument("--beta1", type=float, default=OptimizerConfig().beta1)
    parser.add_argument("--learning-rate", type=float, default=OptimizerConfig().learning_rate)
    parser.add_argument("--nu", type=float, default=1.0, help="below 1: QHAdam with this share of momentum in a step")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = TrainingConfig(
        train=TrainConfig(steps=options.steps),
        model=ModelConfig(width=options.width),
        optimizer=OptimizerConfig(beta1=options.beta1, learning_rate=options.learning_rate),
    )
    torch.set_num_threads(config.train.threads)
    run, rows = Run(config, options.stages, options.micro_batches, options.nu), []
    for name in options.schedules.split(","):
        row = run.measure(name)
        rows.append(row)
        row["ratio"] = row["held_out_loss"] / rows[0]["held_out_loss"]
        if not options.json:
            print(
                f"{name:24} held out {row['held_out_loss']:.4f}, ratio {row['ratio']:.4f}; training "
                f"{row['first_losses']:.4f} → {row['last_losses']:.4f}; versions {row['versions_held']}; "
                f"{row['seconds']:.0f} s",
                flush=True,
            )
    if options.json:
        given = {name: getattr(options, name) for name in ("steps", "stages", "beta1", "nu")}
        print(json.dumps(given | {"rows": rows}))


if __name__ == "__main__":
    main()
