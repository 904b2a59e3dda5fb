"""How a run looks: a live bar on a terminal, lines that grep can read elsewhere.

A bar in a log file is a megabyte of escape codes, and a line per step on a terminal scrolls the start of
the run away.  Both displays take the same records.
"""

from __future__ import annotations

from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from pipeloom.train.metrics import HeldOutRecord, Sink, StepRecord


class Display(Sink, Protocol):
    """A sink that people read."""

    def say(self, text: str) -> None:
        """Show a line of text."""


class Lines:
    """Every ``interval_steps`` steps one line ``key: value  key: value``."""

    def __init__(self, console: Console, interval_steps: int) -> None:
        self._console = console
        self._interval_steps = interval_steps

    def step(self, record: StepRecord) -> None:
        """Show the step if it is due."""
        if record.step % self._interval_steps == 0 or record.step == 1:
            self.say(f"step: {record.step}  {step_text(record)}")

    def held_out(self, record: HeldOutRecord) -> None:
        """Show the evaluation."""
        self.say(held_out_text(record))

    def say(self, text: str) -> None:
        """Show the text as it is: no wrapping, no markup."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is pending."""


class LiveBar:
    """A progress bar with the last step's figures below it; evaluations and texts scroll above."""

    def __init__(self, console: Console, num_steps: int, start: int) -> None:
        self._lines = Lines(console, 1)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[left]} left\n{task.fields[figures]}"),
            console=console,
        )
        self._task = self._progress.add_task("", total=num_steps, completed=start, left="…", figures="")
        self._progress.start()

    def step(self, record: StepRecord) -> None:
        """Move the bar."""
        self._progress.update(
            self._task, completed=record.step, figures=figures_text(record), left=duration_text(record.remaining_s)
        )

    def held_out(self, record: HeldOutRecord) -> None:
        """Show the evaluation above the bar."""
        self._lines.held_out(record)

    def say(self, text: str) -> None:
        """Show the text above the bar."""
        self._lines.say(text)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


def step_text(record: StepRecord) -> str:
    """Return a step's figures on one line, time left included."""
    return f"{figures_text(record)}  eta: {duration_text(record.remaining_s)}"


def figures_text(record: StepRecord) -> str:
    """Return a step's figures on one line."""
    return (
        f"loss: {record.loss:.4f}  grad_norm: {record.grad_norm:.2f}  tps: {record.tokens_per_s:.0f}  "
        f"bubble: {record.bubble_fraction:.0%}  memory: {record.memory_bytes / 2**30:.2f}GiB"
    )


def held_out_text(record: HeldOutRecord) -> str:
    """Return both held-out losses on one line, nats per byte."""
    return (
        f"step: {record.step}  held_out_loss: {record.held_out_loss:.4f}  "
        f"bigram_loss: {record.bigram_loss:.4f}  margin: {record.margin:.4f}"
    )


def duration_text(seconds: float) -> str:
    """Return 62.3 as ``1m02s``, 3723 as ``1h02m``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
