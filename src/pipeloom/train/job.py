"""`pipeloom train` from its flags to its last line: assemble the parts, run the loop, say how it went."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from pipeloom.pipeline import Pipeline
from pipeloom.train.batches import Batches
from pipeloom.train.config import Layer, TrainingConfig
from pipeloom.train.config_file import read_config_file, to_toml
from pipeloom.train.corpus import Corpus, load_corpus
from pipeloom.train.display import Display, Lines, LiveBar
from pipeloom.train.factory import build_model
from pipeloom.train.flags import Invocation
from pipeloom.train.held_out import HeldOut, next_byte_loss, precision_of
from pipeloom.train.interrupt import Interrupt
from pipeloom.train.loop import Loop, make_optimizer
from pipeloom.train.metrics import JsonLines, Sink, Sinks, TensorBoard
from pipeloom.train.run_folder import Start, find_start, prepare_folder

FINISHED = 0
INTERRUPTED = 130


def train(invocation: Invocation, console: Console) -> int:
    """Run or continue a training run; everything that can be wrong with the input is found before it starts.

    Returns:
        0, or 130 after Ctrl-C.

    Raises:
        PipeloomError: whatever the user can put right.
    """
    layers = [*_file_layer(invocation.config_path), invocation.layer]
    start = find_start(invocation.resume, layers)
    config = start.config
    with _threads(config.train.threads), Interrupt() as interrupt:
        corpus = load_corpus(config.data.paths, config.data.held_out_fraction, config.model.sequence_length)
        with contextlib.closing(_pipeline(config)) as pipe:
            loop = _loop(start, corpus, pipe)
            notes = (*start.notes, *prepare_folder(start))
            display = _display(console, config, loop.step_index)
            loop.sink = Sinks([*_files(start.folder, config), display])
            try:
                _introduce(display, start, corpus, pipe, notes)
                loop.run(min(config.train.steps, invocation.stop_after or config.train.steps), interrupt)
            finally:
                loop.sink.close()
        _conclude(console, loop, start.folder, interrupt.is_set)
    return INTERRUPTED if interrupt.is_set else FINISHED


def _file_layer(path: Path | None) -> list[Layer]:
    return [] if path is None else [read_config_file(path)]


@contextlib.contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Give every operation so many threads: each rank is a thread already, and bits depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pipeline(config: TrainingConfig) -> Pipeline:
    """Build and cut the model."""
    pipeline = config.pipeline
    return Pipeline(
        build_model(config.model, config.train.seed),
        num_stages=pipeline.num_stages,
        schedule=pipeline.schedule,
        num_microbatches=pipeline.num_microbatches,
        loss_fn=next_byte_loss,
        recompute=pipeline.recompute,
        cuts=list(pipeline.cuts) or None,
        seed=config.train.seed,
        trace=True,
    )


def _loop(start: Start, corpus: Corpus, pipe: Pipeline) -> Loop:
    config = start.config
    precision = precision_of(config.train.autocast)
    batches = Batches(
        corpus.training,
        batch_size=config.train.batch_size,
        sequence_length=config.model.sequence_length,
        seed=config.train.seed,
    )
    loop = Loop(
        config=config,
        pipe=pipe,
        optimizer=make_optimizer(pipe, config.optimizer),
        batches=batches,
        held_out=HeldOut(corpus, config, precision),
        precision=precision,
        sink=Sinks([]),
        store=start.store if config.checkpoint.enabled else None,
        fingerprint=corpus.fingerprint,
    )
    if start.snapshot is not None:
        loop.restore(start.snapshot)
    return loop


def _files(folder: Path, config: TrainingConfig) -> list[Sink]:
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl")]
    if config.metrics.tensorboard:
        with contextlib.suppress(ImportError):
            sinks.append(TensorBoard(folder / "tensorboard"))
    return sinks


def _display(console: Console, config: TrainingConfig, step_index: int) -> Display:
    if console.is_terminal:
        return LiveBar(console, config.train.steps, step_index)
    return Lines(console, config.metrics.interval_steps)


def _introduce(display: Display, start: Start, corpus: Corpus, pipe: Pipeline, notes: Sequence[str]) -> None:
    num_parameters = sum(parameter.numel() for parameter in pipe.parameters())
    training, held_out = corpus.num_documents
    display.say(to_toml(start.config).rstrip())
    display.say(
        f"text: {training} documents, {len(corpus.training) / 1e6:.2f} MB to train on; "
        f"{held_out}, {len(corpus.held_out) / 1e6:.2f} MB held out"
    )
    display.say(f"model: {num_parameters / 1e6:.2f} M parameters in {pipe.num_stages} stages")
    begins = f"from step {start.snapshot.step_index}" if start.snapshot else "new"
    display.say(f"run: {start.folder} ({begins})")
    for note in notes:
        display.say(f"note: {note}")


def _conclude(console: Console, loop: Loop, folder: Path, is_interrupted: bool) -> None:
    say = Lines(console, 1).say
    saved = f"saved {loop.store.path_of(loop.saved_step)}" if loop.store and loop.saved_step else "nothing was saved"
    if is_interrupted:
        say(f"interrupted after step {loop.step_index}; {saved}")
    elif loop.last_evaluation is not None:
        record = loop.last_evaluation
        say(
            f"held-out loss {record.held_out_loss:.4f} nats per byte; a bigram of the same text has "
            f"{record.bigram_loss:.4f}, so the margin is {record.margin:.4f}; {saved}"
        )
    if loop.store and loop.step_index < loop.config.train.steps:
        say(f"continue with: pipeloom train --resume {folder}")
