"""Small runs of `pipeloom train`, in processes as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SMALL = """
[model]
factory = "tests.launch.victims:model"
num_layers = 2
width = 16
num_heads = 2
sequence_length = 16
dropout = 0.2

[data]
paths = ["text"]
held_out_fraction = 0.3

[train]
steps = 8
batch_size = 4

[optimizer]
warmup_steps = 2

[checkpoint]
interval_steps = 3
num_kept = 9

[metrics]
interval_steps = 1
held_out_interval_steps = 4
num_held_out_windows = 8
tensorboard = false
"""


def make_place(folder: Path) -> Path:
    """A folder with some text and a configuration."""
    (folder / "text").mkdir()
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text(f"text number {number} is a text of some words " * 5)
    (folder / "small.toml").write_text(SMALL)
    return folder


def started(place: Path, *words: str, victim: str = "- - 0 -") -> subprocess.Popen[str]:
    """Start `pipeloom train`; it is the test's to wait for."""
    command = [sys.executable, "-m", "pipeloom", "train", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VICTIM": victim}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=place, env=environment, stdout=pipe, stderr=pipe, text=True)


def trained(place: Path, *words: str, victim: str = "- - 0 -") -> subprocess.CompletedProcess[str]:
    """Run `pipeloom train` to its end."""
    process = started(place, *words, victim=victim)
    out, err = process.communicate(timeout=280)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def weights(run: Path, step_index: int = 8) -> dict[str, bytes]:
    """Every file of weights and optimizer state of a checkpoint."""
    return {path.name: path.read_bytes() for path in (run / "checkpoints" / f"step-{step_index:06d}").glob("stage-*")}


def losses(run: Path) -> list[tuple[Any, ...]]:
    """Kind, step and loss of every line of a run's metrics."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(each["kind"], each["step"], each.get("loss", each.get("held_out_loss"))) for each in records]
