"""The loop: a step, its figures, and now and then an evaluation and a checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from pipeloom.checkpoint import (
    CheckpointStore,
    Snapshot,
    check_same_model,
    load_optimizer_state,
    optimizer_state,
)
from pipeloom.errors import CheckpointError
from pipeloom.pipeline import Pipeline
from pipeloom.train.batches import Batches
from pipeloom.train.config import OptimizerConfig, TrainingConfig
from pipeloom.train.held_out import HeldOut, Precision
from pipeloom.train.interrupt import Interrupt
from pipeloom.train.learning_rate import learning_rate_at
from pipeloom.train.metrics import HeldOutRecord, Pace, Sink, StepRecord, peak_memory_bytes

_PACE_STEPS = 20


def make_optimizer(pipe: Pipeline, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019) over all stages; only matrices decay."""
    parameters = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True)


@dataclass
class Loop:
    """A run between two checkpoints.

    Attributes:
        store: where checkpoints go, or None to keep none.
        fingerprint: of the text that ``batches`` walk through.
        step_index: completed steps; the whole state is this, the model, the optimizer and
            ``batches.position``, since every random draw is keyed by (seed, step).
        saved_step: the step of the newest checkpoint.
        last_evaluation: the newest held-out record, None before the first.
    """

    config: TrainingConfig
    pipe: Pipeline
    optimizer: torch.optim.Optimizer
    batches: Batches
    held_out: HeldOut
    precision: Precision
    sink: Sink
    store: CheckpointStore | None
    fingerprint: str
    step_index: int = 0
    saved_step: int = 0
    last_evaluation: HeldOutRecord | None = None
    _pace: Pace = field(default_factory=lambda: Pace(_PACE_STEPS))

    def run(self, until: int, interrupt: Interrupt) -> None:
        """Train up to ``until`` completed steps, or until interrupted; ends with a checkpoint."""
        self.evaluate()
        while self.step_index < until and not interrupt.is_set:
            self.sink.step(self.step())
            if self._is_due(self.config.checkpoint.interval_steps):
                self.save()
            if self._is_due(self.config.metrics.held_out_interval_steps):
                self.evaluate()
        self.save()
        if not interrupt.is_set:
            self.evaluate()

    def step(self) -> StepRecord:
        """Run one optimizer step."""
        began_s = time.perf_counter()
        rate = learning_rate_at(self.step_index, self.config.train.steps, self.config.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = next(self.batches)
        with self.precision():
            loss = self.pipe.step(inputs, target=targets)
        norm = self.pipe.clip_grad_norm_(self.config.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_index += 1
        step_s = time.perf_counter() - began_s
        self._pace.add(inputs.numel(), step_s)
        return self._record(float(loss), float(norm), rate, step_s)

    def evaluate(self) -> None:
        """Score the held-out text, once per step."""
        if self.last_evaluation is None or self.last_evaluation.step != self.step_index:
            self.last_evaluation = self.held_out.evaluate(self.pipe, self.step_index)
            self.sink.held_out(self.last_evaluation)

    def save(self) -> None:
        """Write a checkpoint, if checkpoints are kept and this step has none."""
        if self.store is not None and self.step_index != self.saved_step:
            self.store.save(self.snapshot(), self.config.checkpoint.num_kept)
            self.saved_step = self.step_index

    def snapshot(self) -> Snapshot:
        """Return the state between two steps."""
        names = dict(self.pipe.named_parameters())
        training = {
            "position": self.batches.position,
            "fingerprint": self.fingerprint,
            "config": self.config.model_dump(mode="json"),
        }
        return Snapshot(self.step_index, self.pipe.state_dict(), optimizer_state(self.optimizer, names), training)

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot.

        Raises:
            CheckpointError: it is of another model or of another text.
        """
        check_same_model(snapshot.model, self.pipe.state_dict(), "the snapshot")
        if snapshot.training["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step_index} was trained on another text: its place in the data "
                "means nothing here",
                "give the --data.* flags of the run that saved it, and the same files",
            )
        self.pipe.load_state_dict(snapshot.model)
        load_optimizer_state(self.optimizer, dict(self.pipe.named_parameters()), snapshot.optimizer)
        self.batches.position = snapshot.training["position"]
        self.step_index = self.saved_step = self.pipe.step_index = snapshot.step_index

    def _is_due(self, interval_steps: int) -> bool:
        return interval_steps > 0 and self.step_index % interval_steps == 0

    def _record(self, loss: float, grad_norm: float, learning_rate: float, step_s: float) -> StepRecord:
        return StepRecord(
            step=self.step_index,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            step_s=step_s,
            tokens_per_s=self._pace.tokens_per_s,
            bubble_fraction=self.pipe.timeline.bubble_fraction,
            memory_bytes=peak_memory_bytes(),
            remaining_s=self._pace.remaining_s(self.config.train.steps - self.step_index),
        )
