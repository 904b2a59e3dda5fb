"""How long training stops for a checkpoint that is written in the background.

    python -m benchmarks.checkpoint [--saves 15] [--folder DIR] [--json]

The default run of `pipeloom train` (byte-level GPT, two stages, AdamW). Each round is three steps, a save, and three
steps while it is written; then it is waited for. The stop is what `Saver.save` takes in the training thread: agreeing,
the folder, the copy in memory. Figures are medians, with the range of the middle half; the first save is counted apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pipeloom as pl
from pipeloom.checkpoint import CheckpointStore, Saver, snapshot_of
from pipeloom.train.config import TrainingConfig
from pipeloom.train.factory import build_model
from pipeloom.train.held_out import next_byte_loss
from pipeloom.train.loop import make_optimizer

STEPS_APART = 3


def seconds(function: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


def measure(num_saves: int, folder: Path) -> dict[str, Any]:
    """The times of all steps and saves, in seconds."""
    config = TrainingConfig()
    torch.set_num_threads(config.train.threads)
    model = build_model(config.model, config.train.seed)
    inputs = torch.randint(256, (config.train.batch_size, config.model.sequence_length))
    options = config.pipeline.model_dump(include={"num_stages", "schedule", "num_microbatches"})
    times: dict[str, list[float]] = {"stop_s": [], "step_s": [], "step_during_save_s": [], "written_s": []}
    with pl.Pipeline(model, loss_fn=next_byte_loss, **options) as pipe:
        optimizer = make_optimizer(pipe, config.optimizer)

        def step() -> None:
            pipe.step(inputs, target=inputs)
            pipe.clip_grad_norm_(config.optimizer.clip_norm)
            optimizer.step()
            optimizer.zero_grad()

        saver = Saver(CheckpointStore(folder / "checkpoints", num_kept=2))
        for _ in range(STEPS_APART):
            step()
            saver.prepare(lambda: snapshot_of(pipe, optimizer))
        for _ in range(num_saves + 1):
            times["step_s"] += [seconds(step) for _ in range(STEPS_APART)]
            began_s = time.perf_counter()
            times["stop_s"].append(seconds(lambda: saver.save(snapshot_of(pipe, optimizer, extra=config.model_dump()))))
            times["step_during_save_s"] += [seconds(step) for _ in range(STEPS_APART) if saver.is_busy]
            saver.finish()
            times["written_s"].append(time.perf_counter() - began_s)
        newest = saver.store.path_of(saver.store.steps()[-1])
        num_bytes = sum(path.stat().st_size for path in newest.iterdir())
    return {**times, "first_stop_s": times["stop_s"].pop(0), "num_bytes": num_bytes}


def summary(times: dict[str, Any]) -> dict[str, float]:
    """Medians and quartiles; stops also as a share of a step."""
    figures = {"first_stop_s": times["first_stop_s"], "num_bytes": times["num_bytes"]}
    for name in ("stop_s", "step_s", "step_during_save_s", "written_s"):
        low, middle, high = statistics.quantiles(times[name], n=4) if len(times[name]) > 1 else times[name] * 3
        figures |= {name: middle, f"{name}_low": low, f"{name}_high": high}
    figures["stop_over_step"] = figures["stop_s"] / figures["step_s"]
    figures["first_stop_over_step"] = figures["first_stop_s"] / figures["step_s"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=15, help="counted saves (default 15)")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = summary(measure(options.saves, Path(folder)))
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    print(f"checkpoint: {figures['num_bytes'] / 1e6:.1f} MB")
    for name, title in (
        ("step_s", "a step"),
        ("stop_s", "stop for a save"),
        ("step_during_save_s", "a step while one is written"),
        ("written_s", "until it is on the disk"),
    ):
        low, high = figures[f"{name}_low"], figures[f"{name}_high"]
        print(f"{title:28} {figures[name] * 1e3:8.2f} ms  ({low * 1e3:.2f} to {high * 1e3:.2f})")
    print(f"{'stop ÷ step':28} {figures['stop_over_step']:8.1%}     (the first: {figures['first_stop_over_step']:.1%})")


if __name__ == "__main__":
    main()
