"""Records and where they go."""

import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

from pipeloom.train.metrics import (
    HeldOutRecord,
    StepRecord,
    duration_text,
    json_lines,
    lines,
    live_bar,
    peak_memory_bytes,
    say,
    set_repeated_aside,
    tensorboard,
)


def step_record(step: int = 10) -> StepRecord:
    return StepRecord(
        step=step,
        loss=2.34567,
        grad_norm=0.712,
        learning_rate=0.001,
        step_s=0.25,
        tokens_per_s=12345.6,
        bubble_fraction=0.1234,
        memory_bytes=655_000_000,
        remaining_s=62.3,
    )


HELD_OUT = HeldOutRecord(step=10, held_out_loss=1.5, bigram_loss=2.25, margin=0.75)


def plain_console() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=40), stream


def test_a_step_is_one_line_that_grep_can_read() -> None:
    console, stream = plain_console()
    with lines(console, 10) as sink:
        sink(step_record(10))
    assert stream.getvalue() == (
        "step: 10  loss: 2.3457  grad_norm: 0.71  tps: 12346  bubble: 12%  memory: 0.61GiB  eta: 1m02s\n"
    )


def test_held_out_losses_are_one_line() -> None:
    console, stream = plain_console()
    with lines(console, 1000) as sink:
        sink(HELD_OUT)
    assert stream.getvalue() == "step: 10  held_out_loss: 1.5000  bigram_loss: 2.2500  margin: 0.7500\n"


def test_lines_come_every_few_steps_and_at_the_first() -> None:
    console, stream = plain_console()
    with lines(console, 4) as sink:
        for step in range(1, 10):
            sink(step_record(step))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1", "4", "8"]


def test_text_is_printed_as_it_is() -> None:
    console, stream = plain_console()
    say(console, "[bold]not markup[/] " + "x" * 100)
    assert stream.getvalue() == "[bold]not markup[/] " + "x" * 100 + "\n"


def test_bar_shows_the_last_step_and_evaluations_scroll() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with live_bar(console, 20, 0) as sink:
        sink(step_record(10))
        sink(HELD_OUT)
    shown = stream.getvalue()
    assert "10/20" in shown
    assert "loss: 2.3457" in shown
    assert "step: 10  held_out_loss: 1.5000" in shown


def test_json_lines_hold_every_figure(tmp_path: Path) -> None:
    with json_lines(tmp_path / "metrics.jsonl") as sink:
        sink(step_record(1))
        sink(HELD_OUT)
    step, held_out = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (step["kind"], step["step"], step["loss"], step["memory_bytes"]) == ("step", 1, 2.34567, 655_000_000)
    assert held_out == {"kind": "held_out", "step": 10, "held_out_loss": 1.5, "bigram_loss": 2.25, "margin": 0.75}


def test_json_lines_are_appended_and_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        with json_lines(path) as sink:
            sink(step_record(step))
            assert len(path.read_text().splitlines()) == step


def test_without_tensorboard_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with tensorboard(tmp_path / "events") as sink:
        sink(step_record())
    assert list(tmp_path.iterdir()) == []


class RecordingWriter:
    """What tensorboard's SummaryWriter is to us."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.purge_step = purge_step
        self.scalars: dict[str, tuple[float, int]] = {}
        WRITERS.append((folder, self))

    def __enter__(self) -> "RecordingWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.scalars["closed"] = (1.0, 0)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name] = (value, step)


WRITERS: list[tuple[str, RecordingWriter]] = []


def test_tensorboard_gets_a_curve_for_each_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    vars(module).update(SimpleNamespace(SummaryWriter=RecordingWriter).__dict__)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with tensorboard(tmp_path / "events", 2) as sink:
        sink(step_record(3))
        sink(HELD_OUT)
    folder, writer = WRITERS.pop()
    assert (folder, writer.purge_step) == (str(tmp_path / "events"), 3)
    assert writer.scalars["step/loss"] == (2.34567, 3)
    assert writer.scalars["held_out/bigram_loss"] == (2.25, 10)
    assert "closed" in writer.scalars


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (62.3, "1m02s"), (3599.7, "1h00m"), (3723, "1h02m"), (90000, "25h00m")],
)
def test_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_peak_memory_is_in_bytes_and_never_falls() -> None:
    before = peak_memory_bytes()
    block = bytearray(50_000_000)
    assert 10_000_000 < before <= peak_memory_bytes() < 1e12
    assert len(block) == 50_000_000


def line(kind: str, step: int) -> str:
    return json.dumps({"kind": kind, "step": step}) + "\n"


def metrics_of_a_run(path: Path) -> list[str]:
    """Held-out losses at 0, 2 and 4, steps 1 to 5."""
    lines = [line("held_out", 0)]
    for step in range(1, 6):
        lines += [line("step", step), *([line("held_out", step)] if step % 2 == 0 else [])]
    path.write_text("".join(lines))
    return lines


@pytest.mark.parametrize(("step_index", "num_kept"), [(0, 0), (1, 2), (2, 3), (4, 6), (5, 8)])
def test_repeated_steps_are_set_aside(tmp_path: Path, step_index: int, num_kept: int) -> None:
    """The step itself stays; the held-out loss after it is measured again."""
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics-set-aside.jsonl"
    lines = metrics_of_a_run(path)
    set_repeated_aside(path, step_index)
    assert path.read_text() == "".join(lines[:num_kept])
    assert (aside.read_text() if aside.exists() else "") == "".join(lines[num_kept:])
    assert len(list(tmp_path.iterdir())) == 1 + aside.exists()


def test_what_is_set_aside_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        metrics_of_a_run(path)
        set_repeated_aside(path, 4)
    assert (tmp_path / "metrics-set-aside.jsonl").read_text() == 2 * (line("held_out", 4) + line("step", 5))


@pytest.mark.parametrize(
    "torn", ['{"kind": "step", "st', '{"kind": "step", "step": 2}', '{"step": 2}\n', "[]\n", "\udcff"]
)
def test_torn_line_is_set_aside(tmp_path: Path, torn: str) -> None:
    """The process was killed while it wrote it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes((line("step", 1) + torn).encode(errors="surrogateescape"))
    set_repeated_aside(path, 3)
    assert path.read_text() == line("step", 1)


def test_run_without_metrics_has_nothing_to_set_aside(tmp_path: Path) -> None:
    set_repeated_aside(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []
