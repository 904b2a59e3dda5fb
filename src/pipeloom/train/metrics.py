"""What a step and a held-out evaluation report, and where it goes: a file, a terminal, TensorBoard.

A bar in a log file is a megabyte of escape codes, and a line per step on a terminal scrolls the start of
the run away; so both displays take the same records. A sink is a function, opened by a context.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    ``step`` counts completed steps, this one included; ``loss`` is in nats per byte; ``grad_norm`` is before
    clipping; ``tokens_per_s`` and ``remaining_s`` follow from recent steps; ``memory_bytes`` is the process's peak,
    of several the largest; ``failed_saves`` counts checkpoints that could not be written.
    """

    kind: ClassVar = "step"
    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    tokens_per_s: float
    bubble_fraction: float
    memory_bytes: int
    remaining_s: float
    failed_saves: int = 0

    def __str__(self) -> str:
        return (
            f"loss: {self.loss:.4f}  grad_norm: {self.grad_norm:.2f}  tps: {self.tokens_per_s:.0f}  "
            f"bubble: {self.bubble_fraction:.0%}  memory: {self.memory_bytes / 2**30:.2f}GiB  "
            f"eta: {duration_text(self.remaining_s)}"
        )


@dataclass(frozen=True)
class HeldOutRecord:
    """Losses on the same held-out bytes, nats per byte; ``margin`` is how much better the model is."""

    kind: ClassVar = "held_out"
    step: int
    held_out_loss: float
    bigram_loss: float
    margin: float

    def __str__(self) -> str:
        losses = f"held_out_loss: {self.held_out_loss:.4f}  bigram_loss: {self.bigram_loss:.4f}"
        return f"{losses}  margin: {self.margin:.4f}"


Record = StepRecord | HeldOutRecord
Sink = Callable[[Record], object]


@contextlib.contextmanager
def json_lines(path: Path) -> Iterator[Sink]:
    """Append one object a record to ``path``; its ``kind`` is "step" or "held_out"."""
    with path.open("a", encoding="utf-8", buffering=1) as file:
        yield lambda record: file.write(json.dumps({"kind": record.kind} | asdict(record)) + "\n")


def set_repeated_aside(path: Path, step_index: int) -> None:
    """Before a run goes on after ``step_index``: keep the lines of what it does again out of its metrics.

    A run that died has gone some steps beyond its last checkpoint. Their lines are moved to ``…-set-aside.jsonl``
    beside it, so that each step is in the file once. The held-out loss at ``step_index`` is measured again too.
    """
    if not path.exists():
        return
    kept: list[str] = []
    repeated: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        (kept if _is_before(line, step_index) else repeated).append(line)
    if repeated:
        with path.with_name(f"{path.stem}-set-aside{path.suffix}").open("a", encoding="utf-8") as aside:
            aside.writelines(line.rstrip("\n") + "\n" for line in repeated)
        part = path.with_name(f".{path.name}.part")
        part.write_text("".join(kept), encoding="utf-8")
        part.replace(path)


def _is_before(line: str, step_index: int) -> bool:
    try:
        record = json.loads(line)
        return line.endswith("\n") and int(record["step"]) < step_index + (record["kind"] == StepRecord.kind)
    except (ValueError, TypeError, KeyError):  # the process was killed while it wrote the line
        return False


@contextlib.contextmanager
def tensorboard(folder: Path, step_index: int = 0) -> Iterator[Sink]:
    """Write event files, if tensorboard is installed; what an earlier process wrote after ``step_index`` is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield lambda record: None  # noqa: ARG005
        return
    with SummaryWriter(str(folder), purge_step=step_index + 1) as writer:
        yield lambda record: _add_scalars(writer, record)


@contextlib.contextmanager
def lines(console: Console, interval_steps: int) -> Iterator[Sink]:
    """Print every evaluation, and every ``interval_steps`` steps a line ``key: value  key: value``."""

    def show(record: Record) -> None:
        if record.kind != StepRecord.kind or record.step == 1 or record.step % interval_steps == 0:
            say(console, f"step: {record.step}  {record}")

    yield show


@contextlib.contextmanager
def live_bar(console: Console, num_steps: int, step_index: int) -> Iterator[Sink]:
    """Keep a bar and the last step's figures at the bottom; evaluations scroll above them."""
    progress = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(None), expand=True)
    bar = progress.add_task("", total=num_steps, completed=step_index)
    with Live(progress, console=console) as live:

        def show(record: Record) -> None:
            if record.kind == StepRecord.kind:
                progress.update(bar, completed=record.step)
                live.update(Group(progress, Text(str(record))))
            else:
                say(console, f"step: {record.step}  {record}")

        yield show


def say(console: Console, text: str) -> None:
    """Print a text as it is: no wrapping, no markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def duration_text(seconds: float) -> str:
    """Return 62.3 as ``1m02s``, 3723 as ``1h02m``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def peak_memory_bytes() -> int:
    """Return the largest resident size that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _add_scalars(writer: Any, record: Record) -> None:
    for name, value in asdict(record).items():
        if name != "step":
            writer.add_scalar(f"{record.kind}/{name}", value, record.step)
