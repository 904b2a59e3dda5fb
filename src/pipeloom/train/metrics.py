"""What a step and a held-out evaluation report, and the files that it goes to."""

from __future__ import annotations

import json
import resource
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: completed steps, this one included.
        loss: mean over the batch, nats per byte.
        grad_norm: of the whole gradient, before clipping.
        learning_rate: of this step.
        step_s: seconds, data to optimizer.
        tokens_per_s: bytes trained on per second, over the last few steps.
        bubble_fraction: idle share of the ranks in forward and backward, measured.
        memory_bytes: the process's peak.
        remaining_s: estimated seconds to the last step.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    tokens_per_s: float
    bubble_fraction: float
    memory_bytes: int
    remaining_s: float


@dataclass(frozen=True)
class HeldOutRecord:
    """Losses on the same held-out bytes, nats per byte."""

    step: int
    held_out_loss: float
    bigram_loss: float

    @property
    def margin(self) -> float:
        """How much better than the bigram the model is, nats per byte."""
        return self.bigram_loss - self.held_out_loss


class Sink(Protocol):
    """Something that records go to: a file, a terminal."""

    def step(self, record: StepRecord) -> None:
        """Take one step."""

    def held_out(self, record: HeldOutRecord) -> None:
        """Take one held-out evaluation."""

    def close(self) -> None:
        """Write what is pending."""


class JsonLines:
    """``metrics.jsonl``: one object a record, ``kind`` "step" or "held_out"; appended to on a resume."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def step(self, record: StepRecord) -> None:
        """Append a line."""
        self._write("step", asdict(record))

    def held_out(self, record: HeldOutRecord) -> None:
        """Append a line."""
        self._write("held_out", asdict(record) | {"margin": record.margin})

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind} | fields) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard; raises ImportError where it is not installed."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def step(self, record: StepRecord) -> None:
        """Add one point to each curve."""
        for name, value in asdict(record).items():
            if name not in ("step", "remaining_s"):
                self._writer.add_scalar(f"train/{name}", value, record.step)

    def held_out(self, record: HeldOutRecord) -> None:
        """Add one point to both curves."""
        self._writer.add_scalar("held_out/loss", record.held_out_loss, record.step)
        self._writer.add_scalar("held_out/bigram_loss", record.bigram_loss, record.step)

    def close(self) -> None:
        """Flush."""
        self._writer.close()


class Sinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def step(self, record: StepRecord) -> None:
        """Pass a step on."""
        for sink in self._sinks:
            sink.step(record)

    def held_out(self, record: HeldOutRecord) -> None:
        """Pass an evaluation on."""
        for sink in self._sinks:
            sink.held_out(record)

    def close(self) -> None:
        """Close all."""
        for sink in self._sinks:
            sink.close()


class Pace:
    """Tokens per second and time left, over the last ``length`` steps."""

    def __init__(self, length: int) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=length)

    def add(self, num_tokens: int, step_s: float) -> None:
        """Count one step."""
        self._recent.append((num_tokens, step_s))

    @property
    def tokens_per_s(self) -> float:
        """Of the recent steps together."""
        return sum(tokens for tokens, _ in self._recent) / sum(step_s for _, step_s in self._recent)

    def remaining_s(self, num_steps: int) -> float:
        """Return the seconds that ``num_steps`` more steps take at this pace."""
        return num_steps * sum(step_s for _, step_s in self._recent) / len(self._recent)


def peak_memory_bytes() -> int:
    """Return the largest resident size that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
