"""`pipeloom train` from its configuration to its last line: assemble the parts, run, say how it went.

Every rank comes through here. What only one may do (choosing the folder, writing into it, talking) the first one does,
and what can go wrong goes wrong on all of them together.
"""

from __future__ import annotations

import contextlib
import signal
import warnings
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from rich.console import Console
from torch import nn

from pipeloom.errors import ConfigError, DataError, PeerFailed, PipeloomError, PipeloomWarning
from pipeloom.launch.together import Job, NoJob, find_job, from_first, gathered, num_started, together
from pipeloom.pipeline import Pipeline
from pipeloom.train.batches import Batches, held_out_windows
from pipeloom.train.config import Layer, TrainingConfig, to_toml, with_processes
from pipeloom.train.corpus import Corpus, load_corpus
from pipeloom.train.factory import build_model
from pipeloom.train.held_out import HeldOut, Precision, bigram_loss, next_byte_loss
from pipeloom.train.loop import Loop, make_optimizer
from pipeloom.train.metrics import Record, Sink, json_lines, lines, live_bar, say, tensorboard
from pipeloom.train.run_folder import METRICS, Start, find_start, prepare_folder
from pipeloom.train.stop import Stop

_OF_ONE: Final = (signal.SIGINT, signal.SIGTERM)
_OF_RANKS: Final = (*_OF_ONE, signal.SIGHUP)


def train(
    layers: Sequence[Layer],
    console: Console,
    *,
    resume: str | None = None,
    stop_after: int | None = None,
    job: Job | NoJob | None = None,
) -> int:
    """Run or continue a training run; what is wrong with the input is found before a folder is made.

    Where torchrun, or `pipeloom train --launch`, has started several processes, all of them call this.

    Args:
        layers: configuration from files and flags.
        console: where progress is shown, by the first rank.
        resume: as for `find_start`.
        stop_after: the step at which to stop, if not at the last.
        job: the processes, if the caller has found them already.

    Returns:
        The number of the signal that stopped it, or 0.

    Raises:
        PipeloomError: whatever the user can put right; where several processes train, `SaidElsewhere` on all but one.
        PeerFailed: another rank failed.
    """
    job, stop = job or find_job(), Stop()
    if job.rank:
        console = Console(quiet=True)
        warnings.simplefilter("ignore", PipeloomWarning)  # what there is to warn of, the first rank warns of
    given = together(job, "the number of stages", lambda: with_processes(layers, num_started()))
    start = find_start(resume, given, job, job.remembered())
    if not start.is_again:
        job.remember(start.origin)
    config = start.config
    # Each rank is a thread or a process already, and bits depend on how many threads share one operation.
    torch.set_num_threads(config.train.threads)
    corpus = _corpus(job, config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop.listening(*(_OF_RANKS[:1] if job.num_ranks > 1 else _OF_ONE)))
        model, pipe = together(job, "the pipeline", lambda: _pipeline(config))
        stack.enter_context(pipe)
        # Until now a launcher that ends this rank meets nobody who would mind.
        stack.enter_context(stop.listening(*(_OF_ONE if num_started() is None else _OF_RANKS)))
        stop.group = pipe.group
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        loop, prepared = _begun(start, corpus, pipe, stop)
        notes = (*start.notes, *prepared, *_nothing_left(start, stop_after))
        _introduce(console, start, corpus, pipe, num_parameters, notes)
        loop.sink = stack.enter_context(_sinks(start, console, pipe.group.rank))
        loop.run(min(config.train.steps, stop_after or config.train.steps))
    _conclude(console, loop)
    return stop.signal


def _corpus(job: Job | NoJob, config: TrainingConfig) -> Corpus:
    found: list[Corpus] = []

    def load() -> str:
        found.append(load_corpus(config.data.paths, config.data.held_out_fraction, config.model.sequence_length))
        return found[0].fingerprint

    fingerprints = gathered(job, "the text", load)
    other = next((rank for rank, each in enumerate(fingerprints) if each != fingerprints[0]), None)
    if other is not None:
        raise DataError(
            f"ranks 0 and {other} read different texts under the same names; every rank has to read the same",
            "give all hosts the same files",
        )
    return found[0]


def _pipeline(config: TrainingConfig) -> tuple[nn.Module, Pipeline]:
    model = build_model(config.model, config.train.seed)
    pipe = Pipeline(
        model,
        num_stages=config.pipeline.num_stages,
        schedule=config.pipeline.schedule,
        num_microbatches=config.pipeline.num_microbatches,
        loss_fn=next_byte_loss,
        recompute=config.pipeline.recompute,
        cuts=list(config.pipeline.cuts) or None,
        seed=config.train.seed,
        trace=True,
        example_args=(torch.zeros(1, config.model.sequence_length, dtype=torch.long),),
    )
    if pipe.schedule.updates:
        pipe.close()
        raise ConfigError(
            f"pipeline.schedule is {pipe.schedule.name!r}, which updates weights before a step is over; this loop "
            "clips gradients by the norm of all stages and has one optimizer, so it needs the end of each step",
            "take a synchronous schedule, or train in a loop of your own with pipe.stream (docs/asynchronous.md)",
        )
    return model, pipe


def _begun(start: Start, corpus: Corpus, pipe: Pipeline, stop: Stop) -> tuple[Loop, Sequence[str]]:
    """Make the loop and the run's folder; return what there is to say about that."""
    try:
        loop = together(pipe.group, "the start", lambda: _loop(start, corpus, pipe, stop))
        return loop, from_first(pipe.group, "the run's folder", lambda: prepare_folder(start))
    except PeerFailed:
        raise
    except PipeloomError:
        pipe.close()  # every rank raises it: nobody has to be told
        raise


def _loop(start: Start, corpus: Corpus, pipe: Pipeline, stop: Stop) -> Loop:
    config, length, precision = start.config, start.config.model.sequence_length, _precision(start.config)
    windows = held_out_windows(corpus.held_out, config.metrics.num_held_out_windows, length)
    # Seconds of counting, and only the first rank's is shown.
    baseline = bigram_loss(corpus.training, windows) if pipe.group.rank == 0 else 0.0
    loop = Loop(
        config=config,
        pipe=pipe,
        optimizer=make_optimizer(pipe, config.optimizer),
        batches=Batches(
            corpus.training, batch_size=config.train.batch_size, sequence_length=length, seed=config.train.seed
        ),
        fingerprint=corpus.fingerprint,
        held_out=HeldOut(windows, baseline, precision),
        precision=precision,
        sink=lambda _: None,
        store=start.store if config.checkpoint.enabled else None,
        stop=stop,
        is_under_way=start.is_under_way,
    )
    loop.held_out.probe(pipe)
    if start.checkpoint is not None:
        loop.restore(start.checkpoint.read(pipe.state_dict()), start.checkpoint.forms)
    return loop


def _precision(config: TrainingConfig) -> Precision:
    if config.train.autocast == "off":
        return contextlib.nullcontext
    return lambda: torch.autocast("cpu", dtype=torch.bfloat16)


@contextlib.contextmanager
def _sinks(start: Start, console: Console, rank: int) -> Iterator[Sink]:
    """Open every sink as one; on other ranks than the first there is none."""
    if rank:
        yield lambda _: None
        return
    config = start.config
    with contextlib.ExitStack() as stack:
        sinks = [stack.enter_context(json_lines(start.folder / METRICS))]
        if config.metrics.tensorboard:
            sinks.append(stack.enter_context(tensorboard(start.folder / "tensorboard", start.step_index)))
        bar = live_bar(console, config.train.steps, start.step_index) if console.is_terminal else None
        sinks.append(stack.enter_context(bar or lines(console, config.metrics.interval_steps)))

        def sink(record: Record) -> None:
            for each in sinks:
                each(record)

        yield sink


def _introduce(
    console: Console, start: Start, corpus: Corpus, pipe: Pipeline, num_parameters: int, notes: Sequence[str]
) -> None:
    trained, held_out = corpus.num_documents
    sizes = f"{len(corpus.training) / 1e6:.2f} MB to train on, {len(corpus.held_out) / 1e6:.2f} MB held out"
    say(console, to_toml(start.config).rstrip())
    say(console, f"text: {trained} + {held_out} documents, {sizes}")
    say(console, f"model: {num_parameters / 1e6:.2f} M parameters in {pipe.num_stages} stages{_on_processes(pipe)}")
    say(console, f"run: {start.folder}, from step {start.step_index}")
    for note in notes:
        say(console, f"note: {note}")


def _nothing_left(start: Start, stop_after: int | None) -> Iterator[str]:
    """Yield why a resumed run will not train, if it will not: its last lines look like those of one that did."""
    num_steps = start.config.train.steps
    if start.checkpoint is None or start.step_index < min(num_steps, stop_after or num_steps):
        return
    reached = f"step {start.step_index} of {num_steps} is reached, nothing is left to train"
    is_whole = start.step_index >= num_steps
    yield f"{reached}; --train.steps N goes on to step N" if is_whole else f"{reached} before --stop_after {stop_after}"


def _on_processes(pipe: Pipeline) -> str:
    return f" on {pipe.group.num_ranks} processes" if pipe.group.num_ranks > 1 else ""


def _conclude(console: Console, loop: Loop) -> None:
    saved = f"saved {loop.store.path_of(loop.saved_step)}" if loop.store and loop.saved_step else "nothing saved"
    if loop.stop.signal:
        word = "interrupted" if loop.stop.signal == signal.SIGINT else "terminated"
        say(console, f"{word} after step {loop.step_index}; {saved}")
    elif (record := loop.evaluation) is not None:
        say(console, f"held-out loss {record.held_out_loss:.4f} nats per byte; {saved}")
        say(console, f"a bigram of the same text has {record.bigram_loss:.4f}; the margin is {record.margin:.4f}")
    if loop.saved_step and loop.step_index < loop.config.train.steps:
        num_ranks = loop.pipe.group.num_ranks
        launch = f"--launch {num_ranks} " if num_ranks > 1 else ""
        say(console, f"continue with: pipeloom train {launch}--resume {loop.config.train.folder}")
