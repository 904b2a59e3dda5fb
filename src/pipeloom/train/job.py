"""`pipeloom train` from its configuration to its last line: assemble the parts, run, say how it went."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console

from pipeloom.pipeline import Pipeline
from pipeloom.train.batches import Batches, held_out_windows
from pipeloom.train.config import Layer, TrainingConfig, to_toml
from pipeloom.train.corpus import Corpus, load_corpus
from pipeloom.train.factory import build_model
from pipeloom.train.held_out import HeldOut, Precision, bigram_loss, next_byte_loss
from pipeloom.train.loop import Loop, make_optimizer
from pipeloom.train.metrics import Record, Sink, json_lines, lines, live_bar, say, tensorboard
from pipeloom.train.run_folder import Start, find_start, prepare_folder


def train(
    layers: Sequence[Layer], console: Console, *, resume: str | None = None, stop_after: int | None = None
) -> bool:
    """Run or continue a training run; what is wrong with the input is found before a folder is made.

    Args:
        layers: configuration from files and flags.
        console: where progress is shown.
        resume: as for `find_start`.
        stop_after: the step at which to stop, if not at the last.

    Returns:
        False if Ctrl-C stopped it.

    Raises:
        PipeloomError: whatever the user can put right.
    """
    start = find_start(resume, layers)
    config = start.config
    # Each rank is a thread already, and bits depend on how many threads share one operation.
    torch.set_num_threads(config.train.threads)
    corpus = load_corpus(config.data.paths, config.data.held_out_fraction, config.model.sequence_length)
    with noted_interrupt() as interrupt, contextlib.closing(_pipeline(config)) as pipe:
        loop = _loop(start, corpus, pipe)
        notes = (*start.notes, *prepare_folder(start), *_nothing_left(start, stop_after))
        _introduce(console, start, corpus, pipe, notes)
        with _sinks(start, console) as loop.sink:
            loop.run(min(config.train.steps, stop_after or config.train.steps), interrupt)
    _conclude(console, loop, interrupt.is_set())
    return not interrupt.is_set()


@contextlib.contextmanager
def noted_interrupt() -> Iterator[threading.Event]:
    """Set the event at the first Ctrl-C, which the loop reads between steps; the second one interrupts.

    A KeyboardInterrupt in the middle of a step would leave gradients half added and a checkpoint unwritten.
    """
    event = threading.Event()

    def note(*_: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield event
        return
    previous = signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)


def _pipeline(config: TrainingConfig) -> Pipeline:
    return Pipeline(
        build_model(config.model, config.train.seed),
        num_stages=config.pipeline.num_stages,
        schedule=config.pipeline.schedule,
        num_microbatches=config.pipeline.num_microbatches,
        loss_fn=next_byte_loss,
        recompute=config.pipeline.recompute,
        cuts=list(config.pipeline.cuts) or None,
        seed=config.train.seed,
        trace=True,
    )


def _loop(start: Start, corpus: Corpus, pipe: Pipeline) -> Loop:
    config, length, precision = start.config, start.config.model.sequence_length, _precision(start.config)
    windows = held_out_windows(corpus.held_out, config.metrics.num_held_out_windows, length)
    loop = Loop(
        config=config,
        pipe=pipe,
        optimizer=make_optimizer(pipe, config.optimizer),
        batches=Batches(
            corpus.training, batch_size=config.train.batch_size, sequence_length=length, seed=config.train.seed
        ),
        fingerprint=corpus.fingerprint,
        held_out=HeldOut(windows, bigram_loss(corpus.training, windows), precision),
        precision=precision,
        sink=lambda _: None,
        store=start.store if config.checkpoint.enabled else None,
    )
    loop.held_out.probe(pipe)
    if start.snapshot is not None:
        loop.restore(start.snapshot)
    return loop


def _precision(config: TrainingConfig) -> Precision:
    if config.train.autocast == "off":
        return contextlib.nullcontext
    return lambda: torch.autocast("cpu", dtype=torch.bfloat16)


@contextlib.contextmanager
def _sinks(start: Start, console: Console) -> Iterator[Sink]:
    """Open every sink as one."""
    config, step_index = start.config, start.snapshot.step_index if start.snapshot else 0
    with contextlib.ExitStack() as stack:
        sinks = [stack.enter_context(json_lines(start.folder / "metrics.jsonl"))]
        if config.metrics.tensorboard:
            sinks.append(stack.enter_context(tensorboard(start.folder / "tensorboard")))
        is_live = console.is_terminal
        bar = live_bar(console, config.train.steps, step_index) if is_live else None
        sinks.append(stack.enter_context(bar or lines(console, config.metrics.interval_steps)))

        def sink(record: Record) -> None:
            for each in sinks:
                each(record)

        yield sink


def _introduce(console: Console, start: Start, corpus: Corpus, pipe: Pipeline, notes: Sequence[str]) -> None:
    num_parameters = sum(parameter.numel() for parameter in pipe.parameters())
    trained, held_out = corpus.num_documents
    sizes = f"{len(corpus.training) / 1e6:.2f} MB to train on, {len(corpus.held_out) / 1e6:.2f} MB held out"
    say(console, to_toml(start.config).rstrip())
    say(console, f"text: {trained} + {held_out} documents, {sizes}")
    say(console, f"model: {num_parameters / 1e6:.2f} M parameters in {pipe.num_stages} stages")
    say(console, f"run: {start.folder}, from step {start.snapshot.step_index if start.snapshot else 0}")
    for note in notes:
        say(console, f"note: {note}")


def _nothing_left(start: Start, stop_after: int | None) -> Iterator[str]:
    """Yield why a resumed run will not train, if it will not: its last lines look like those of one that did."""
    num_steps = start.config.train.steps
    if start.snapshot is None or start.snapshot.step_index < min(num_steps, stop_after or num_steps):
        return
    reached = f"step {start.snapshot.step_index} of {num_steps} is reached, nothing is left to train"
    is_whole = start.snapshot.step_index >= num_steps
    yield f"{reached}; --train.steps N goes on to step N" if is_whole else f"{reached} before --stop_after {stop_after}"


def _conclude(console: Console, loop: Loop, is_interrupted: bool) -> None:
    saved = f"saved {loop.store.path_of(loop.saved_step)}" if loop.store and loop.saved_step else "nothing saved"
    if is_interrupted:
        say(console, f"interrupted after step {loop.step_index}; {saved}")
    elif (record := loop.evaluation) is not None:
        say(console, f"held-out loss {record.held_out_loss:.4f} nats per byte; {saved}")
        say(console, f"a bigram of the same text has {record.bigram_loss:.4f}; the margin is {record.margin:.4f}")
    if loop.saved_step and loop.step_index < loop.config.train.steps:
        say(console, f"continue with: pipeloom train --resume {loop.config.train.folder}")
