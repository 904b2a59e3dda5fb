"""The loop: a step, its figures, and now and then an evaluation and a checkpoint."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from pipeloom.checkpoint import (
    CheckpointStore,
    Layout,
    Saver,
    Snapshot,
    check_same_model,
    group_of,
    load_optimizer_state,
    optimizer_state,
)
from pipeloom.errors import CheckpointError
from pipeloom.pipeline import Pipeline
from pipeloom.train.batches import Batches
from pipeloom.train.config import OptimizerConfig, TrainingConfig
from pipeloom.train.held_out import HeldOut, Precision
from pipeloom.train.metrics import HeldOutRecord, Sink, StepRecord, peak_memory_bytes
from pipeloom.train.stop import Stop

_RECENT_STEPS = 20


def learning_rate_at(step_index: int, num_steps: int, config: OptimizerConfig) -> float:
    """Return the rate of step ``step_index`` (from 0): linear warm-up, then half a cosine.

    A function of the step needs no state, where a scheduler that counts its calls is one more thing to save.
    The last of ``num_steps`` steps has ``config.final_fraction`` of the full rate (SGDR, Loshchilov and Hutter
    2017, equation 5, with one cycle).
    """
    if step_index < config.warmup_steps:
        return config.learning_rate * (step_index + 1) / config.warmup_steps
    decay_steps = max(1, num_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step_index - config.warmup_steps) / decay_steps)
    share = config.final_fraction + (1 - config.final_fraction) * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * share


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
    """A run. Its whole state is the model, the optimizer, ``batches.position`` and ``step_index``.

    Random draws need none: each is keyed by the seed and the step.

    Attributes:
        fingerprint: of the text that ``batches`` walk through.
        sink: takes the records.
        stop: says when to stop before the last step.
        is_under_way: whether it goes on, started again by a launcher, as if nothing had happened.
        store: where checkpoints go, or None to keep none.
        step_index: completed steps.
        saved_step: the step of the newest checkpoint that is whole.
        evaluation: the newest held-out record, None before the first.
    """

    config: TrainingConfig
    pipe: Pipeline
    optimizer: torch.optim.Optimizer
    batches: Batches
    fingerprint: str
    held_out: HeldOut
    precision: Precision
    sink: Sink
    store: CheckpointStore | None
    stop: Stop = field(default_factory=Stop)
    is_under_way: bool = False
    step_index: int = 0
    saved_step: int = 0
    evaluation: HeldOutRecord | None = None
    _begun_step: int = 0
    _recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def run(self, until: int) -> None:
        """Train up to ``until`` completed steps, or until stopped; ends with a checkpoint. All ranks call it.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        with contextlib.nullcontext() if self.store is None else self.saver:
            self.stop.agree()
            if not self.is_under_way or self._is_due(self.config.metrics.held_out_interval_steps):
                self.evaluate()
            while self.step_index < until and not self.stop.signal:
                self.sink(self.step())
                if self._is_due(self.config.checkpoint.interval_steps):
                    self.save()
                if self._is_due(self.config.metrics.held_out_interval_steps):
                    self.evaluate()
            self.save()
            self.stop.agree()
            self.evaluate()
        self._note_saves()

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
        self.stop.agree()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_index += 1
        if self.store is not None:
            self.saver.prepare(self.snapshot)
        self._note_saves()
        self._recent_s.append(time.perf_counter() - began_s)
        mean_s = sum(self._recent_s) / len(self._recent_s)
        return StepRecord(
            step=self.step_index,
            loss=float(loss),
            grad_norm=float(norm),
            learning_rate=rate,
            step_s=self._recent_s[-1],
            tokens_per_s=inputs.numel() / mean_s,
            bubble_fraction=self.pipe.timeline.bubble_fraction,
            memory_bytes=max(self.stop.memory_bytes, peak_memory_bytes()),
            remaining_s=(self.config.train.steps - self.step_index) * mean_s,
            failed_saves=0 if self.store is None else self.saver.failed_saves,
        )

    def evaluate(self) -> None:
        """Score the held-out text, once per step, unless the run stops."""
        is_scored = self.evaluation is not None and self.evaluation.step == self.step_index
        if not is_scored and not self.stop.signal:
            self.evaluation = self.held_out.evaluate(self.pipe, self.step_index)
            self.sink(self.evaluation)
            self.stop.agree()

    @cached_property
    def saver(self) -> Saver:
        """Writes the checkpoints, in the background."""
        assert self.store is not None, "only asked for where checkpoints are kept"
        return Saver(replace(self.store, num_kept=self.config.checkpoint.num_kept), group_of(self.pipe))

    def save(self) -> None:
        """Begin to write a checkpoint, if checkpoints are kept and this step has none."""
        if self.store is not None and self.step_index != self._begun_step:
            self._begun_step = self.step_index
            self.saver.save(self.snapshot())

    def snapshot(self) -> Snapshot:
        """Return the state between two steps."""
        optimizer = optimizer_state(self.optimizer, dict(self.pipe.named_parameters()))
        config = self.config.model_dump(mode="json")
        training = {"position": self.batches.position, "fingerprint": self.fingerprint, "config": config}
        return Snapshot(self.step_index, self.pipe.state_dict(), optimizer, training, layout=Layout.of(self.pipe))

    def restore(self, snapshot: Snapshot, forms: Mapping[str, Any] | None = None) -> None:
        """Go on from a snapshot; collective.

        Args:
            snapshot: of this rank's part at least.
            forms: what the checkpoint has of the whole model; by default that is the snapshot's.

        Raises:
            CheckpointError: it is of another model or of another text.
        """
        model, parameters = self.pipe.state_dict(), dict(self.pipe.named_parameters())
        place = f"the checkpoint of step {snapshot.step_index}"
        check_same_model(snapshot.model if forms is None else forms, model, place, group_of(self.pipe))
        if snapshot.training["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"{place} was trained on another text, in which its place in the data means nothing",
                "give the same files, and the --data.* flags of the run that saved it",
            )
        self.pipe.load_state_dict({name: snapshot.model[name] for name in model})
        mine = {name: state for name, state in snapshot.optimizer.items() if name in parameters}
        load_optimizer_state(self.optimizer, parameters, mine)
        self.batches.position = snapshot.training["position"]
        self.step_index = self.saved_step = self._begun_step = self.pipe.step_index = snapshot.step_index

    def _note_saves(self) -> None:
        if self.store is not None:
            self.saver.poll()
            self.saved_step = self.saver.saved_step or self.saved_step

    def _is_due(self, interval_steps: int) -> bool:
        return interval_steps > 0 and self.step_index % interval_steps == 0
